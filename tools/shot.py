"""Pictures of a page as people see it: `python tools/shot.py PAGE.html FOLDER [JAVASCRIPT]`.

Wide and narrow, light and dark, in the Chromium that the tests use. The JavaScript, if any, runs
first: to open a layer, say.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "reporting"))

import chromium  # noqa: E402


def main(page: Path, folder: Path, script: str = "") -> None:
    executable = chromium.find()
    if executable is None:
        sys.exit("There is no Chromium here: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with chromium.browser(executable) as browser:
        tab = browser.page()
        for width, height in ((1400, 1000), (400, 860)):
            for dark in (False, True):
                tab.look(width, height, dark=dark)
                tab.open(page)
                if script:
                    tab.run(script)
                tab.settle()
                tab.picture(folder / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png")
        for complaint in tab.complaints:
            sys.stderr.write(complaint + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
