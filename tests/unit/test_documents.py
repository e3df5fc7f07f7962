"""What the documents say about the code is still so: variables, options, messages, codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "server").rglob("*.py"),
    *(ROOT / "trainer_agent").rglob("*.py"),
    *(ROOT / "tests" / "support").rglob("*.py"),
    ROOT / "hatch_build.py",
]
VARIABLE = re.compile(r"\bGRADIOMETER_([A-Z]+(?:_[A-Z]+)*)\b")
INTERNAL = {"TEST_MARK"}


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def texts(path: Path) -> list[str]:
    """String literals of a source file, neighbouring and formatted parts joined, `…` for each value."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(str(part) for part in parts))
    return found


ALL_TEXT = "\n".join(text for path in SOURCES for text in texts(path)) + document("Makefile")


def variables_read_by_the_code() -> set[str]:
    read = set(VARIABLE.findall(ALL_TEXT))
    settings = document("trainer_agent/gradiometer/settings.py")
    return (read | set(re.findall(r'_env\("([A-Z_]+)"\)', settings))) - INTERNAL


def test_every_variable_is_documented_and_every_documented_one_is_read() -> None:
    documented = set(VARIABLE.findall(document("docs/configuration.md")))
    assert documented == variables_read_by_the_code()


def test_variables_in_other_documents_exist() -> None:
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/troubleshooting.md",
        "docker-compose.yml",
        "Dockerfile",
    ):
        assert set(VARIABLE.findall(document(name))) <= variables_read_by_the_code(), name


def test_messages_in_troubleshooting_are_messages_of_the_program() -> None:
    rows = [line for line in document("docs/troubleshooting.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    gone = []
    for row in rows:
        cell = row.split("|")[1]
        gone += [text for text in re.findall(r"`([^`]+)`", cell) if text not in ALL_TEXT]
    assert not gone


def test_codes_in_troubleshooting_are_codes_of_the_server() -> None:
    text = document("docs/troubleshooting.md")
    codes = {code for row in re.findall(r"^\| \d{3} \| `(\w+)`", text, re.MULTILINE) for code in [row]}
    section = text.partition("## Codes of the wire protocol")[2]
    codes |= {code for code in re.findall(r"`([a-z]+_[a-z_]+)`", section) if code != "expected_seq"}
    assert len(codes) > 12
    assert not {code for code in codes if f'"{code}"' not in source_of_the_server()}


def test_every_code_of_the_wire_protocol_is_explained() -> None:
    section = document("docs/troubleshooting.md").partition("## Codes of the wire protocol")[2]
    used = set()
    for path in (ROOT / "server" / "gradiometer_server" / "ingest").rglob("*.py"):
        used |= set(re.findall(r'code="([a-z_]+)"', path.read_text(encoding="utf-8")))
    assert used, "no codes found in ingest/"
    assert not {code for code in used if f"`{code}`" not in section}


def source_of_the_server() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "server").rglob("*.py"))
