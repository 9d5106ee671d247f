"""The Python examples of the documentation run as they stand, against a broker on the documented address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from braid.runtime.config import describe
from braid.testing.broker import BackgroundBroker
from braid.web.config import StandaloneConfig

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/guides/quickstart.md",
    "docs/guides/scalable-topics.md",
    "docs/guides/sdk.md",
    "docs/guides/transactions.md",
]
DOCUMENTED_URL = "pulsar://localhost:6650"


def examples() -> list[tuple[str, str]]:
    """(where, code) of each complete example: those that connect to a broker."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        found += [(f"{page}:{number}", block) for number, block in enumerate(blocks) if DOCUMENTED_URL in block]
    return found


def test_there_are_examples() -> None:
    assert len(examples()) >= 3


@pytest.mark.parametrize(("where", "code"), examples(), ids=[where for where, _ in examples()])
def test_example_runs(braid_broker: BackgroundBroker, where: str, code: str) -> None:
    program = code.replace(DOCUMENTED_URL, braid_broker.service_url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{where}: {done.stderr}"


def test_links_between_pages_lead_somewhere() -> None:
    generated = {"docs/requirements.md"}  # written by the test run itself
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                path = (page.parent / target).resolve()
                assert path.exists() or str(path.relative_to(ROOT)) in generated, f"{page}: {target}"


def test_settings_named_in_the_guides_exist() -> None:
    sections = describe(StandaloneConfig)
    known = {f"{each.section}.{each.key}" for each in sections}
    prefixes = {name.partition(".")[0] for name in known}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]:
        for section, key in re.findall(r"`(\w+)\.([a-z_]+)[^`.(/]*`", page.read_text()):
            if section in prefixes and key != "py":
                assert f"{section}.{key}" in known, f"{page}: {section}.{key}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
