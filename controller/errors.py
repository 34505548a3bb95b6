"""The one error that means the input was wrong, not the program."""


class UserError(Exception):
    """One line for the user: what was wrong, where, and what is allowed. The command line exits 2."""
