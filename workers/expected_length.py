"""How many tokens a request will have at its end: what the dispatch says, corrected by what came true."""

from collections import OrderedDict

from workers.request import Request

# Of a new observation in a tenant's ratio. Up is faster than down: who expects too little takes blocks that
# were promised to others, who expects too much only waits a little.
_WEIGHT_UP = 0.2
_WEIGHT_DOWN = 0.05
# Of a request that passed its expectation: it counts again when it ends.
_WEIGHT_PASSED = 0.05
_MAX_RATIO = 64.0
_MAX_TENANTS = 4096


class ExpectedLengths:
    """Expected output lengths, scaled by a running ratio of real to expected ones for each tenant.

    A request that passes its expectation counts at once, not only at its end: when a tenant's outputs become
    ten times as long, the next request that is admitted is expected to be longer already.
    """

    def __init__(self) -> None:
        self._ratios: OrderedDict[str, float] = OrderedDict()

    def ratio(self, tenant: str) -> float:
        """Real length by expected length, as seen lately; 1 for a tenant that was not seen."""
        return self._ratios.get(tenant, 1.0)

    def num_output_tokens(self, request: Request) -> int:
        """The output tokens that the request is expected to end with, more than it has, at most its limit."""
        expected = int(_said(request) * self._ratios.get(request.tenant, 1.0) + 0.5)
        so_far = len(request.output_token_ids)
        if expected <= so_far:
            expected = 2 * so_far
        return max(1, min(expected, request.max_output_tokens))

    def on_passed(self, request: Request) -> int:
        """Takes it that the request has passed its expectation, and returns the next one: twice as much."""
        expected = min(2 * max(1, len(request.output_token_ids)), request.max_output_tokens)
        self._note(request.tenant, expected / _said(request), _WEIGHT_PASSED)
        return expected

    def on_end(self, request: Request) -> None:
        """Takes the length of a request that ended by itself."""
        self._note(request.tenant, len(request.output_token_ids) / _said(request), _WEIGHT_UP)

    def _note(self, tenant: str, ratio: float, weight_up: float) -> None:
        ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
        ratios = self._ratios
        known = ratios.get(tenant)
        if known is None:
            known = 1.0
            if len(ratios) >= _MAX_TENANTS:
                ratios.popitem(last=False)
        else:
            ratios.move_to_end(tenant)
        ratios[tenant] = known + (weight_up if ratio > known else _WEIGHT_DOWN) * (ratio - known)


def _said(request: Request) -> int:
    said = request.expected_output_tokens
    return max(1, request.sampling.max_tokens if said is None else said)
