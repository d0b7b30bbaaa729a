"""Which part of a decoder each rank of a tensor-parallel worker has, in which pieces it is computed. Pure.

As Megatron-LM cuts a layer (Shoeybi et al. 2019, section 3): of the matrices before attention and activation
a rank has some outputs, of those behind them the same inputs, and what these give is summed over all ranks.
"""

from dataclasses import dataclass

from workers.models.decoder_config import DecoderConfig
from workers.rank_settings import SETTING, RanksError

# Of the deterministic mode: it then has the same bits on any number of ranks that divides them. More than two
# only where each still has so many columns of the feed-forward layer: four pieces of Gemma 3 270M (of 2,048
# columns) took a decode of one sequence twice as long as one piece, on two cores with AVX2.
MOST_PIECES = 8
_MIN_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Sharding:
    """Rank `rank` of `num_ranks`, which each have as many of the model's `num_pieces` equal pieces.

    A piece has its share of the query heads and of the feed-forward layer; KV heads that are fewer than the
    ranks are on several of them. Where there are more pieces than ranks, each is computed by itself and the
    sums over them are taken in their order. All ranges are of the whole model.
    """

    config: DecoderConfig
    num_pieces: int = 1
    num_ranks: int = 1
    rank: int = 0

    @property
    def num_own_pieces(self) -> int:
        return self.num_pieces // self.num_ranks

    @property
    def own_pieces(self) -> range:
        return range(self.rank * self.num_own_pieces, (self.rank + 1) * self.num_own_pieces)

    @property
    def num_heads(self) -> int:
        """Query heads of the rank."""
        return self.config.num_heads // self.num_ranks

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the rank."""
        return max(1, self.config.num_kv_heads // self.num_ranks)

    @property
    def query_rows(self) -> range:
        """Rows of the query matrix, and columns of attention's output matrix."""
        size = self.num_heads * self.config.head_dim
        return range(self.rank * size, (self.rank + 1) * size)

    @property
    def kv_rows(self) -> range:
        """Rows of the key and of the value matrix."""
        head_dim, first = self.config.head_dim, self._first_kv_head
        return range(first * head_dim, (first + self.num_kv_heads) * head_dim)

    @property
    def intermediate(self) -> range:
        """Rows of the gate and of the up matrix, and columns of the down matrix."""
        size = self.config.intermediate_size // self.num_ranks
        return range(self.rank * size, (self.rank + 1) * size)

    @property
    def attention_pieces(self) -> list[tuple[slice, slice]]:
        """For each piece of the rank, which of the rank's query heads it has, and which of its KV heads."""
        num_heads = self.num_heads // self.num_own_pieces
        num_kv_heads = max(1, self.config.num_kv_heads // self.num_pieces)
        pieces = []
        for index, piece in enumerate(self.own_pieces):
            kv = piece * self.config.num_kv_heads // self.num_pieces - self._first_kv_head
            heads = slice(index * num_heads, (index + 1) * num_heads)
            pieces.append((heads, slice(kv, kv + num_kv_heads)))
        return pieces

    def vocab_piece_size(self, vocab_size: int) -> int:
        """Rows of the output matrix in each piece; the last pieces are filled up."""
        return -(-vocab_size // self.num_pieces)

    def vocab(self, vocab_size: int) -> range:
        """Rows of the embedding and of the output matrix that the rank has."""
        size = self.vocab_piece_size(vocab_size) * self.num_own_pieces
        return range(min(self.rank * size, vocab_size), min((self.rank + 1) * size, vocab_size))

    @property
    def _first_kv_head(self) -> int:
        return self.rank * self.config.num_kv_heads // self.num_ranks


def shard(config: DecoderConfig, num_ranks: int, rank: int, *, exact: bool) -> Sharding:
    """`exact`: computed so that the number of ranks changes no bit.

    Raises RanksError naming the setting for a number of ranks that does not go with the model.
    """
    if problem := why_not_split(config, num_ranks):
        raise RanksError(f"{SETTING} is {num_ranks}: {problem}")
    if not exact:
        return Sharding(config, num_ranks, num_ranks, rank)
    num_pieces = exact_pieces(config)
    if num_pieces % num_ranks:
        raise RanksError(
            f"{SETTING} is {num_ranks}: deterministic mode computes this model in {num_pieces} pieces, which "
            "it must divide"
        )
    return Sharding(config, num_pieces, num_ranks, rank)


def exact_pieces(config: DecoderConfig) -> int:
    """In how many pieces the deterministic mode computes a model, however many ranks there are."""
    most = min(MOST_PIECES, max(2, config.intermediate_size // _MIN_COLUMNS))
    return next(count for count in range(most, 0, -1) if not why_not_split(config, count))


def why_not_split(config: DecoderConfig, count: int) -> str:
    """Why a model cannot be split evenly over so many ranks or pieces; empty if it can."""
    if config.num_heads % count:
        return f"the model's {config.num_heads} heads are no multiple of it"
    if config.intermediate_size % count:
        return f"the model's intermediate size, {config.intermediate_size}, is no multiple of it"
    if config.num_kv_heads % count and count % config.num_kv_heads:
        return f"the model's {config.num_kv_heads} KV heads are neither a multiple nor a divisor of it"
    return ""
