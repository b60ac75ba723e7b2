"""Work beside the training: one thread that writes files."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """One job at a time runs in a thread of its own. Its error is raised where the run looks next.

    In a `with` statement, what is still being written at the end is written to its end.
    """

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def __enter__(self) -> "Background":
        """Jobs can be started anyway."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait; after an error in the run itself, that of a job is not told."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if kind is None:
            self.wait()

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, after the one before it has ended."""
        self.wait()
        self._thread = self._thread or ThreadPoolExecutor(1, "cenet writes")
        self._job = self._thread.submit(job)

    def look(self) -> None:
        """Raise the error of a job that has failed; go on if it still runs."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing runs."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
