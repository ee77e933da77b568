"""One bar for a whole job: what is running, how far it is, how long it will take."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtl.rank import is_first

__all__ = ["Bar"]


class Bar:
    """A job of `total` units of work in named stages; without a terminal it prints one line a stage."""

    def __init__(self, total: float, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=not is_first())
        self.live = self.console.is_terminal and not self.console.quiet
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("to go"),
        )  # fmt: skip
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task("", total=total)
        self.done = self.base = 0.0

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def stage(self, name: str, units: float) -> None:
        """Starts a stage that is worth `units`; whatever the last stage left undone counts as done."""
        self.base, self.done = self.done, self.done + units
        self.units = units
        self.progress.update(self.task, description=name, completed=self.base)
        if not self.live:
            self.console.print(name, highlight=False)

    def advance(self, fraction: float) -> None:
        """Says how much of the stage is done, from 0 to 1."""
        self.progress.update(self.task, completed=self.base + self.units * min(1.0, fraction))
