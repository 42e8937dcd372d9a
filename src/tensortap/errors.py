"""Every error that is the user's to mend.

    TapError                    the base: catch this to catch them all
    ├── TargetError             a target that does not import, or does not fit
    ├── SelectionError          no such layer, a malformed pattern            (also a ValueError)
    ├── OptionError             an option that does not fit                   (also a ValueError)
    ├── RecordingError          a recording that cannot be read or written
    │   ├── NotARecordingError  a folder that holds none
    │   ├── RecordingExistsError a folder that already holds one
    │   ├── VersionError        a recording from a newer tensortap
    │   └── DamagedError        a truncated or corrupt file
    ├── ComparisonError         recordings that cannot be compared
    ├── LayoutError             a tree of .pt, .npy or .npz files that cannot be read or written
    ├── MissingExtraError       a package that is not installed               (also an ImportError)
    └── WatchAlarm              a rule of a watch that came true, where the user asked to raise

A message is a sentence: what is wrong, where, what was got and expected, what to do.
The command line prints it alone and exits with 2. Anything else that escapes is a bug of ours:
there it is a line that says so, exits with 2 as well, and says where to report it.
"""

from __future__ import annotations

__all__ = [
    "ComparisonError",
    "DamagedError",
    "LayoutError",
    "MissingExtraError",
    "NotARecordingError",
    "OptionError",
    "RecordingError",
    "RecordingExistsError",
    "SelectionError",
    "TapError",
    "TargetError",
    "VersionError",
    "WatchAlarm",
]


class TapError(Exception):
    """The base of every error that is the user's to mend."""


class TargetError(TapError):
    """A target that cannot be loaded or run."""


class SelectionError(TapError, ValueError):
    """A selection that matches nothing, or cannot be read."""


class OptionError(TapError, ValueError):
    """An option or argument that does not fit."""


class RecordingError(TapError):
    """A recording that cannot be read or written."""


class NotARecordingError(RecordingError):
    """A path that holds no recording."""


class RecordingExistsError(RecordingError):
    """A path that already holds a recording."""


class VersionError(RecordingError):
    """A recording in a format newer than this tensortap reads."""


class DamagedError(RecordingError):
    """A file of a recording that is truncated or corrupt."""


class ComparisonError(TapError):
    """Recordings of which nothing, or not enough, can be compared."""


class LayoutError(TapError):
    """A tree of files that a layout cannot read or write."""


class MissingExtraError(TapError, ImportError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, and that is not installed. "
            f"Install it with: pip install 'tensortap[{extra}]'"
        )


class WatchAlarm(TapError):
    """A rule that came true while a model trained, with the action "raise"."""

    def __init__(self, text: str, alarm: object = None) -> None:
        super().__init__(text)
        self.alarm = alarm
