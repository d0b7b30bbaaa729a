"""What a worker says of its prefix cache, against what the cache finds."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.fleet import FleetView
from schemas.prefix_sketch import DEPTHS, MAX_KEYS, holds, prefix_keys
from schemas.records import Heartbeat
from tests.admission_harness import make_status
from tests.engine_factories import make_engine, make_kv, make_request
from tests.unit.test_engine import running, wait_for
from tests.unit.test_kv_cache_manager import compute, release
from workers.kv_cache_manager import KVCacheManager
from workers.request import Request
from workers.sketch_beat import SketchBeat

PROMPT = list(range(1_000, 1_600))


def prompt_of(tokens: list[int], output: list[int] | None = None, tenant: str = "a") -> Request:
    return make_request(prompt_token_ids=tokens, output_token_ids=output, tenant=tenant)


def known_depth(manager: KVCacheManager, tokens: list[int], tenant: str) -> int:
    """What admission would expect to be found."""
    assert manager.prefix_index is not None
    assert manager.hasher is not None
    told = set(manager.prefix_index.keys())
    found = 0
    for key, depth in zip(prefix_keys(tokens, manager.hasher.salt(tenant)), DEPTHS, strict=False):
        if key not in told:
            break
        found = depth
    return found


def test_says_what_was_computed_as_far_as_it_was() -> None:
    manager = make_kv(100, sharing="tenant")
    request = prompt_of(PROMPT)
    compute(manager, request, 63)
    assert known_depth(manager, PROMPT, "a") == 0
    compute(manager, request, 200)
    assert known_depth(manager, PROMPT, "a") == 192
    compute(manager, request)
    assert known_depth(manager, PROMPT, "a") == 512
    assert known_depth(manager, PROMPT, "b") == 0
    assert known_depth(manager, [*PROMPT[:300], 1, *PROMPT[300:]], "a") == 256


def test_output_is_part_of_the_next_turns_prompt() -> None:
    manager = make_kv(100, sharing="tenant")
    compute(manager, prompt_of(PROMPT[:80], PROMPT[80:300]))
    assert known_depth(manager, PROMPT, "a") == 256


def test_what_all_share_is_known_for_all() -> None:
    manager = make_kv(100, sharing="shared")
    compute(manager, prompt_of(PROMPT))
    assert known_depth(manager, PROMPT, "b") == 512


def test_what_was_evicted_is_not_said() -> None:
    manager = make_kv(40, sharing="tenant")
    first = compute(manager, prompt_of(PROMPT))
    release(manager, first)
    release(manager, compute(manager, prompt_of(list(range(640)))))
    assert known_depth(manager, PROMPT, "a") == 0
    assert known_depth(manager, list(range(640)), "a") == 512


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 400), st.sampled_from("ab")), min_size=1, max_size=25
    )
)
def test_says_no_less_than_two_thirds_of_what_is_found_and_no_more(
    turns: list[tuple[int, int, str]],
) -> None:
    manager = make_kv(60, sharing="tenant")
    for family, length, tenant in turns:
        tokens = [family] * length
        request = prompt_of([*tokens, 9], tenant=tenant)
        found, said = manager.find_cached(request), known_depth(manager, tokens, tenant)
        assert said <= found
        assert said >= found * 2 // 3 or found < DEPTHS[0]
        release(manager, compute(manager, request))


def test_memory_is_bounded() -> None:
    manager = make_kv(16_000, sharing="tenant")
    for n in range(MAX_KEYS // 2 + 10):
        release(manager, compute(manager, prompt_of([n] * 100)))
    assert manager.prefix_index is not None
    assert len(manager.prefix_index.keys()) == MAX_KEYS
    assert known_depth(manager, [5] * 100, "a") == 0
    assert known_depth(manager, [20] * 100, "a") == 96


def test_a_heartbeat_carries_it_once_a_second_and_readers_keep_it() -> None:
    beat, keys = SketchBeat(), tuple(prefix_keys(PROMPT, "a"))
    assert beat.sketch(None, shared=False, now=0.0) == b""
    sketch = beat.sketch(keys, shared=False, now=0.0)
    assert holds(sketch, keys[0])
    assert beat.sketch((), shared=False, now=0.9) == b""
    view = FleetView()
    for at, sent in enumerate((sketch, b"")):
        heartbeat = Heartbeat("worker", 0, 10, b"", worker=make_status(prefix_sketch=sent))
        view.on_heartbeat(heartbeat, at * 100)
    kept = view.live("worker")[0].heartbeat
    assert kept is not None
    assert kept.worker is not None
    assert kept.worker.prefix_sketch == sketch
    assert not holds(beat.sketch((), shared=False, now=1.0), keys[0])  # all was evicted
    view.on_heartbeat(Heartbeat("worker", 0, 11, b"", worker=make_status()), 200)
    new_life = view.live("worker")[0].heartbeat
    assert new_life is not None
    assert new_life.worker is not None
    assert new_life.worker.prefix_sketch == b""


def test_an_engine_that_falls_asleep_says_what_it_learned_last() -> None:
    with running(make_engine(sharing="tenant")) as (thread, outputs):
        for number in (1, 2):
            thread.add(make_request(number, prompt_len=200, max_tokens=2))
            outputs.until_end(thread, number)
            wait_for(lambda n=number: len(thread.stats.prefix_keys or ()) == 4 * n)  # type: ignore[misc]
