"""nginx, HAProxy and Caddy with their files of deploy/: every check holds with the file as shipped, and for each line
a check fails without it. All run at the same time, since some of them wait for a minute."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from shipped import table
from shipped.checks import CHECKS, EDGES, NotStarted, run
from shipped.lines import Mutant, lines, mutants
from support.fake import Fake
from support.https import Broken
from support.shipped import KINDS, shipped

WAITING = {"silence", "idle", "connect", "head", "reload"}
"""They take long and cost nothing."""
HELD = [(kind, name) for name in CHECKS for kind in KINDS if kind in EDGES[name]]
pytestmark = pytest.mark.timeout(600)


class Runs:
    def __init__(self, fake: Fake):
        self._quick, self._waiting = ThreadPoolExecutor(4), ThreadPoolExecutor(64)
        self.held = {(kind, name): self._begin(name, kind, shipped(kind), fake) for kind, name in HELD}
        assert len({str(mutant) for mutant in mutants()}) == len(mutants())
        self.mutants = {str(mutant): self._begin(mutant.check, mutant.kind, mutant.text, fake) for mutant in mutants()}

    def _begin(self, name: str, kind: str, text: str, fake: Fake) -> Future[None]:
        return (self._waiting if name in WAITING else self._quick).submit(run, name, kind, text, fake)

    def end(self) -> None:
        self._quick.shutdown(cancel_futures=True)
        self._waiting.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Fake() as fake:
        runs = Runs(fake)
        yield runs
        runs.end()


@pytest.mark.parametrize(("kind", "name"), HELD)
def test_c136_it_holds_with_the_file_as_shipped(runs: Runs, kind: str, name: str):
    runs.held[kind, name].result()


@pytest.mark.parametrize("mutant", mutants(), ids=str)
def test_c136_a_check_fails_without_it(runs: Runs, mutant: Mutant):
    error = runs.mutants[str(mutant)].exception()
    assert error, "the check holds without it"
    assert isinstance(error, (AssertionError, Broken, OSError, httpx.HTTPError)), repr(error)
    assert mutant.check == "start" or not isinstance(error, NotStarted), str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_each_place_that_a_test_puts_its_own_in_stands_in_the_file(kind: str):
    for place in KINDS[kind].places:
        assert place in shipped(kind), f"{place} is not in deploy/{KINDS[kind].file}"


def test_the_table_of_the_page_is_that_of_the_files():
    table.hold()


@pytest.mark.parametrize("kind", KINDS)
def test_each_line_names_checks_that_exist(kind: str):
    for line in lines(kind):
        for name in line.checks:
            assert kind in EDGES.get(name, ()), f"{line.words}: {name}"
