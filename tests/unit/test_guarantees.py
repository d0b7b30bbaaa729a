"""Every test and fault that the page of guarantees names is there."""

import ast
import re

from infra.chaos_run.faults import faults
from infra.local.paths import PROJECT_ROOT

PAGE = PROJECT_ROOT / "infra" / "GUARANTEES.md"
TEXT = PAGE.read_text()
NAMED = re.findall(r"`((?:unit|integration|e2e)/test_\w+\.py)(?:::(test_\w+))?`", TEXT)
FAULT = re.compile(r"`((?:at_\w+\.)?[a-z]+_[a-z0-9_]+)`")


def test_the_tests_that_show_it_are_there() -> None:
    assert len(NAMED) > 30
    for path, name in NAMED:
        tree = ast.parse((PROJECT_ROOT / "tests" / path).read_text())
        tests = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not name or name in tests, f"{path}::{name}"


def test_the_faults_it_holds_under_are_done_by_a_chaos_run() -> None:
    rows = [line.split("|")[2] for line in TEXT.splitlines() if line.startswith("|") and line.count("|") == 4]
    named = {fault for under in rows for fault in FAULT.findall(under)}
    assert len(named) > 10
    assert named <= set(faults(simulated=True, brokers=1, disaggregated=True))


def test_each_promise_names_what_shows_it() -> None:
    promised = TEXT.split("## Streams")[1].split("## Not promised")[0]
    rows = [line for line in promised.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert len(rows) > 20
    assert [row for row in rows if "`" not in row.split("|")[-2]] == []


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
