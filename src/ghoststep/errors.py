"""Every exception that ghoststep raises on purpose.

    GhoststepError
    ├── UsageError          the call or the command line is wrong                → exit 2
    │   └── ConfigError     [tool.ghoststep], an acceptance or a baseline is wrong
    ├── SubjectError        a subject cannot be opened at all                    → exit 2
    ├── CannotLook          an instrument lacks what it needs                    → verdict `unknown`
    │   ├── UnsafeInput     a file from a stranger breaks a safety rule          → verdict `unknown`, or exit 2 at opening
    │   └── SetupCannotRun  the user's own model, loss or step raised            → verdict `unknown`, and exit 2
    └── DoesNotApply        the question makes no sense for this subject         → verdict `not-applicable`

Anything else that escapes from a check or an instrument is our own defect and becomes a `broken` verdict.
Messages say what was got, what was expected, where, and what to do next.
"""


class GhoststepError(Exception):
    """Base of all deliberate errors."""


class UsageError(GhoststepError):
    """The call is wrong: an unknown code, an option that does not exist, two values that exclude each other."""


class ConfigError(UsageError):
    """A configuration, acceptance or baseline file is wrong."""


class SubjectError(GhoststepError):
    """A subject cannot be opened: not found, empty, an unsupported format, no permission."""


class CannotLook(GhoststepError):  # noqa: N818 - an answer, not a failure
    """An instrument cannot measure here; the message is the reason shown in the `unknown` verdict."""


class UnsafeInput(CannotLook):
    """A file breaks a safety rule (a lying header, a pickle with code, a path that leaves its folder)."""


class SetupCannotRun(CannotLook):
    """The user's own code raised, or returned no loss, where we only ran it as it is: the setup cannot run, whoever runs it."""


class DoesNotApply(GhoststepError):  # noqa: N818 - an answer, not a failure
    """A fact cannot exist for this subject (no output head in an encoder): the verdict is `not-applicable`."""
