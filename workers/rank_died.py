"""What a tensor-parallel runner raises, known without torch."""


class RankDiedError(RuntimeError):
    """Another rank has ended: no step can be computed any more."""
