"""The one exception that a user's mistake or a user's file raises."""


class UserError(Exception):
    """Bad input, file or configuration: one sentence that says what is wrong, where, and what to do.

    The command line prints the message alone and exits with 2; anything else that is raised is a fault of ours.
    """
