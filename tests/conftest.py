"""What holds for every test: how Hypothesis draws, that tests of a GPU want one, and that CI hides nothing.

Where CI=true, a skip is a failure unless the test is marked `gpu`: a suite that skips is a suite that proves less than
it says. A module that skips itself while it is imported fails too, mark or no mark.

A test that judges how long something takes is marked `timed("reason")`. Such tests run alone, after all others (`make test`), and get
one second try: a busy moment of the machine is not a fault of the program, and what is slow is slow again. No other test gets one.
Every second try is listed at the end. With `-p no:rerunfailures` nothing gets a second try.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator

import pytest

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a machine with a GPU may have the engine, pytest and no more: tests marked gpu do without
    settings = None  # type: ignore[assignment,misc]

# No test reaches out. Those of the hub have one of their own, on this machine, and say where its cache is.
os.environ |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
for setting in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
    os.environ.pop(setting, None)

LONGEST = (
    *("tests/ray/", "tests/kernels/test_triton.py", "tests/house/test_types.py", "tests/web/test_walk.py"),
    *("tests/engine/test_memory.py", "tests/worker/test_ranks.py", "tests/faults/", "tests/equivalence/", "tests/engine/test_native.py"),
    *("tests/loading/test_hostile.py", "tests/docs/test_documents.py", "tests/native/test_attention.py", "tests/web/", "tests/gpu/"),
    *("tests/bench/", "tests/house/test_house.py", "tests/cli/test_commands.py", "tests/server/", "tests/worker/", "tests/policy/"),
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # where a shell runs the suite in the background: Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
IN_CI = os.environ.get("CI") == "true"

# In CI the same examples every time, so that a red run means a changed program; by hand, new ones on every run.
# A failure prints the blob that replays it. Half of the usual number, since `make test` runs often.
EXAMPLES = 50
if settings is not None:
    settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, max_examples=EXAMPLES)
    settings.register_profile("dev", deadline=None, print_blob=True, max_examples=EXAMPLES)
    settings.load_profile("ci" if IN_CI else "dev")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Octavo's logger hands nothing on once it is set up, which an earlier test may have done or not: what is caught is caught there."""
    logger = logging.getLogger("octavo")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    return caplog


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if IN_CI and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped in CI, where only tests marked gpu may be: {reason}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: next((place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)))
    if config.pluginmanager.has_plugin("rerunfailures"):  # a machine with a GPU may have pytest and no more
        for item in items:
            if item.get_closest_marker("timed") is not None:
                item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays, so the garbage collector need not look at it: each time that would take it half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if IN_CI and "torch" in sys.modules:  # the same numbers in whichever process and order tests run
        sys.modules["torch"].default_generator.manual_seed(0)
    if item.get_closest_marker("gpu") is not None:
        import torch  # not before it is needed: most tests of policy do without

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail_if_skipped(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Figures that tests recorded, also in worker processes: the long runs are run for them. And who needed a second try, and why."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.line(f"second try: {report.nodeid}: {_last_line(report)}")
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            terminalreporter.line(f"{report.nodeid}: {name}: {value}")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext).strip().partition("\n")[0]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report
