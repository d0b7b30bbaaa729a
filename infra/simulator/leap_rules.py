"""What an engine must be like for a run of decodes to go on in it, and to begin."""

from collections.abc import Sequence

from schemas.priority import PriorityClass
from workers.scheduler import Scheduler

# Relative. The scheduler adds up what a step takes sequence by sequence; in closed form the last bits differ.
_CLOSE_CALL = 1e-9


def may_begin(scheduler: Scheduler, *, beside_prompts: bool) -> bool:
    """Whether the next step can be a run's, as far as scheduler and pools tell: somebody decodes, no block is
    held beyond the next, and `DecodeRun.plan` or `can_step` would not refuse. `beside_prompts`: there may be
    others than those that decode."""
    kv, running = scheduler.kv_cache_manager, scheduler.running
    has_prompts = scheduler.num_waiting > 0
    num_seqs = [0] * len(PriorityClass)
    num_context_tokens = num_due = 0
    for request in running:
        num_computed, num_slots = request.num_computed_tokens, len(request.block_table) * kv.block_size
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens - num_computed != 1:
            has_prompts = True
            num_due += kv.num_blocks_for(num_tokens) - len(request.block_table)
        elif 0 <= num_slots - num_computed < kv.block_size:
            num_seqs[request.priority] += 1
            num_context_tokens += num_computed
            num_due += num_slots == num_computed
        else:
            return False
    if not any(num_seqs) or (has_prompts and not (beside_prompts and scheduler.has_room_for_all(num_due))):
        return False
    interactive, *lower = num_seqs
    mixed = interactive > 0 and any(lower)
    return not is_timed(scheduler, mixed) or is_in_time(scheduler, sum(num_seqs), num_context_tokens)


def is_timed(scheduler: Scheduler, mixed: bool) -> bool:
    """Whether the inter-token target bounds a batch that is `mixed`, of interactive and lower classes."""
    return mixed and scheduler.config.inter_token_target_ms > 0


def is_in_time(scheduler: Scheduler, num_seqs: int, num_context_tokens: int) -> bool:
    """Whether the inter-token target lets all of the lower classes go along in the next step."""
    time = scheduler.step_time
    if num_seqs > time.max_num_seqs:
        return False
    limit = time.line_for(scheduler.config.inter_token_target_ms / 1000, False)
    return time.line(num_seqs, 0, num_context_tokens + num_seqs) < limit * (1 - _CLOSE_CALL)


def holds_all_lower(scheduler: Scheduler, num_by_class: Sequence[int]) -> bool:
    """Whether the lower classes, that decode so many, all stand still beside an interactive prompt."""
    return scheduler.config.hold_batch_in_prefill and not num_by_class[PriorityClass.FREE]
