"""When an engine's steps are decodes alone, of all that it runs: what a leap may begin with."""

from schemas.priority import PriorityClass
from workers.scheduler import Scheduler

# Relative. The scheduler adds up what a step takes sequence by sequence; in closed form the last bits differ.
_CLOSE_CALL = 1e-9


def can_leap(scheduler: Scheduler) -> bool:
    """Whether all requests are running ones that lack one token, no block is held beyond the next, and the
    first step goes as a run's step does."""
    running = scheduler.running
    if scheduler.num_waiting or not len(running):
        return False
    newest = running.last  # mostly the one whose prompt is being computed
    if newest.num_tokens - newest.num_computed_tokens != 1:
        return False
    block_size = scheduler.kv_cache_manager.block_size
    num_context_tokens = 0
    for request in running:
        num_computed = request.num_computed_tokens
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens - num_computed != 1:
            return False
        if not 0 <= len(request.block_table) * block_size - num_computed < block_size:
            return False
        num_context_tokens += num_computed
    mixed = running[0].priority is PriorityClass.INTERACTIVE and running.has_below(PriorityClass.INTERACTIVE)
    return not is_timed(scheduler, mixed) or is_in_time(scheduler, len(running), num_context_tokens)


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
