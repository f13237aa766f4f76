"""The exceptions that a user's mistake, a user's file and a user's signal raise."""

import signal


class UserError(Exception):
    """Bad input, file or configuration: one sentence that says what is wrong, where, and what to do.

    The command line prints the message alone and exits with 2; anything else that is raised is a fault of ours.
    """


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came to a training run at a place where there is nothing to save before it ends.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}: run the command again to go on")
        self.code = 128 + number
        """The exit code, as shells have it."""
