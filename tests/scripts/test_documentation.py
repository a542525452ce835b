"""Tests of README and docs: sentences, words, links, commands, and the messages of troubleshooting.md."""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from xfuser import xFuserArgs
from xfuser.config import FlexibleArgumentParser

from tests import ranks
from xfuser_cocodiff import cli

REPOSITORY = Path(__file__).parent.parent.parent
README = REPOSITORY / "README.md"
DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
PAGES = [README, *(REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "patches/README.md")), *DOCS]
WITH_COMMANDS = [README, *(page for page in DOCS if page.parent.name == "quickstart")]
TROUBLESHOOTING = REPOSITORY / "docs/troubleshooting.md"
FLUX_SCRIPT = REPOSITORY / "tests/stock/flux_script.py"
README_WORDS, ALL_WORDS, SENTENCE_WORDS, CELL_WORDS = 900, 11_000, 25, 12
PRIVATE = re.compile(
    r"\b(anew|mended|slow motion|own splits?|roll call|entrants?|exchanges?|lanes?|take turns|alike)\b", re.IGNORECASE
)
"""Words of the project where the field has others."""
SMALL = "--height 64 --width 64 --num_inference_steps 2 --max_sequence_length 32 --seed 5"


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def fenced(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a block, without leading assignments and `export`s."""
    lines = text.replace("\\\n", " ").splitlines()
    lists = [shlex.split(re.sub(r'"?\$\([^)]*\)"?', "value", line), comments=True) for line in lines]
    lists = [words for words in lists if words and words[0] != "export"]
    return [words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :] for words in lists]


def num_words(text: str) -> int:
    """Return the number of words; the bars of tables are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_pages_have_few_words() -> None:
    assert num_words(README.read_text()) <= README_WORDS
    assert sum(num_words(page.read_text()) for page in [README, *DOCS]) <= ALL_WORDS


def plain_lines(page: Path) -> list[str]:
    """Return the lines of a page without fenced blocks; a code span is a word, and a link is its text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for pattern, plain in ((r"`[^`]+`", "code"), (r"\*", ""), (r"\[([^\]]*)\]\([^)]*\)", r"\1")):
        text = re.sub(pattern, plain, text)
    return text.splitlines()


@pytest.mark.parametrize("page", [README, *DOCS], ids=name_of)
def test_sentences_and_cells_are_short(page: Path) -> None:
    lines = plain_lines(page)
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if num_words(cell) > CELL_WORDS] == []
    # Headings, rows and items begin paragraphs of their own.
    prose = "\n".join("" if line.startswith(("|", "#", "!")) else re.sub(r"^\s*(- |> )+", "\n", line) for line in lines)
    sentences = re.split(r"\n\s*\n|(?<=[.!?])\s", prose)
    assert [each for each in sentences if num_words(each) > SENTENCE_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_have_no_private_words(page: Path) -> None:
    assert PRIVATE.findall(page.read_text()) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as on GitHub and the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFKC", each).lower()) for each in headings)
    return {slug.strip().replace(" ", "-") for slug in slugs}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_troubleshooting_lines_are_in_the_source() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    assert len(quoted) > 30
    trees = (ast.parse(file.read_text()) for file in (REPOSITORY / "xfuser_cocodiff").rglob("*.py"))
    strings = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    source = "\n".join(each for each in strings if isinstance(each, str))
    for line in quoted:
        fixed = [part.strip(" :;,'") for part in line.split("...")]
        assert all(part in source for part in fixed), line


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command by the parser of its program, without running it."""
    program, *arguments = words
    if program in ("torchrun", "mpiexec"):
        starts = ("cocodiff", "python", "-m")
        rest = next(i for i, word in enumerate(arguments) if word in starts or word.endswith(".py"))
        parse(["python", *arguments[rest:]] if arguments[rest] == "-m" else arguments[rest:], monkeypatch)
    elif program == "python" or program.endswith(".py"):
        script, *arguments = words if program.endswith(".py") else arguments
        if script == "flux_example.py":
            parse_xdit(arguments)
        elif script == "-m" and arguments[0] == "xfuser.runner":
            parse_xdit(arguments[1:], "runner")
        elif script != "-m":
            assert (REPOSITORY / script).is_file(), script
    elif program == "cocodiff":
        for command in cli.COMMANDS:
            monkeypatch.setattr(command, "run", parse_xdit_arguments, raising=False)
        assert cli.main(arguments) == 0
    elif program == "xdit":
        parse_xdit(arguments, "runner")
    elif program.startswith("scripts/"):
        assert (REPOSITORY / program).is_file(), program
    else:
        assert program in ("git", "pip", "module", ".", "hf", "qsub", "unset", "scp"), program


def parse_xdit_arguments(options: argparse.Namespace) -> int:
    """Parse the arguments for xDiT of a `cocodiff` command, in place of running it."""
    arguments = options.xdit_arguments
    if arguments:
        is_script = arguments[0].endswith(".py")
        parse_xdit(arguments[is_script:], "script" if is_script else "runner")
    return 0


def parse_xdit(arguments: list[str], parser: str = "script") -> None:
    """Parse arguments by xDiT's parser of scripts, or that of its runner."""
    add = xFuserArgs.add_cli_args if parser == "script" else xFuserArgs.add_runner_args
    xFuserArgs.from_cli_args(add(FlexibleArgumentParser()).parse_args([*arguments, "--use_cocodiff"]))


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_commands = [words for block in fenced(page, "bash") for words in commands(block)]
    assert page_commands
    for words in page_commands:
        parse(words, monkeypatch)


def test_the_readme_adds_one_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = fenced(README, "diff")
    lines = {sign: [line[1:] for line in block.splitlines() if line[0] in f" {sign}"] for sign in "-+"}
    before, after = (commands("\n".join(lines[sign]))[0] for sign in "-+")
    parse(after, monkeypatch)
    assert after == [*before, "--use_cocodiff"]


def runnable(page: str, *programs: str) -> Iterator[str]:
    """Yield the blocks of a page that start with one of these programs and can run on this machine."""
    for block in fenced(REPOSITORY / page, "bash"):
        if commands(block)[0][0] in programs and "emulated_cluster" not in block and "NODE" not in block:
            yield block


def run(text: str, folder: Path) -> str:
    """Run a block in a shell with the commands of this environment; return its output."""
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(REPOSITORY)  # as in the clone, whose folder gets no files
    done = subprocess.run(
        ["bash", "-euc", text],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.slow  # test_commands_are_valid has all of them
def test_the_laptop_quickstart_runs_unchanged(tmp_path: Path) -> None:
    blocks = list(runnable("docs/quickstart/laptop.md", "python", "cocodiff", "xdit"))
    assert len(blocks) == 3
    output = run("\n".join(blocks), tmp_path)
    for block in fenced(REPOSITORY / "docs/quickstart/laptop.md", "text"):
        assert block in output
    assert "bit-identical" in output
    assert (tmp_path / "cocodiff-report/report.html").exists() and (tmp_path / "images.png").exists()


@pytest.mark.slow  # test_commands_are_valid has all of them
@pytest.mark.usefixtures("hub")
def test_the_page_of_one_machine_runs_with_a_small_model(tmp_path: Path) -> None:
    """Leave out `cocodiff compare`, which the laptop quickstart runs."""
    page = "docs/quickstart/one_machine.md"
    blocks = [block for block in runnable(page, "torchrun", "cocodiff", "xdit") if "cocodiff compare" not in block]
    assert len(blocks) == 3
    for block in blocks:
        block = re.sub(r"(nproc_per_node=|ulysses_degree )8", r"\g<1>4", block)
        for model in ("--model black-forest-labs/FLUX.1-dev", "--model FLUX.1-dev"):
            block = block.replace(model, f"{model} {SMALL}")
        block = block.replace("flux_example.py", f"{FLUX_SCRIPT} --coco_path latents.safetensors")
        block = block.replace("torchrun", TORCHRUN)
        run(block, tmp_path)


TORCHRUN = f"torchrun --master_port={ranks.free_port()}"
