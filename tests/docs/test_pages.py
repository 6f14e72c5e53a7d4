"""What README and docs show is what a user sees."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest
import torch
import yaml

from mptrain import shelves
from mptrain.config import compose as composing
from mptrain.config.catalogue import configs_folder, recipes_folder
from mptrain.config.compose import compose
from mptrain.study.recipe.catalogue import recipe_points
from mptrain.study.recipe.recipe import read_recipe
from mptrain.study.sweep.comparisons import name_arms
from mptrain.study.sweep.points import expand, validate
from tests.docs.pages import PAGES, ROOT, blocks, commands
from tests.loops import each
from tests.small_runs import TINY, run_command, run_in_process

README = PAGES["README.md"]
BLOCKS = [block for name in PAGES for block in blocks(name)]
SHOWN = next(block for block in BLOCKS if block.startswith("$ mptrain model=cnn precision=fp16_dynamic train.epochs=3"))


NUMBERS = dict(
    enumerate(
        [
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
        ],
        3,
    )
)


def shape(text):
    """Lines without what differs from run to run and from machine to machine: numbers, names, the device."""
    lines = []
    text = re.sub(r"^(  device +\S+).*(?:\n {13}\S.*)*", r"\1", text, flags=re.MULTILINE)
    for line in text.splitlines():
        if line.startswith("step="):
            continue  # one every few seconds: how many there are depends on the machine
        timeless = re.sub(r"outputs/\S+", "RUN", line)
        lines.append(re.sub(r"[\d.,:]+( [kMG]B)?", "#", timeless).rstrip())
    return lines


@pytest.mark.process
def test_the_run_that_is_shown_looks_like_a_run(tmp_path):
    first, _, output = SHOWN.partition("\n")
    words = first.removeprefix("$ mptrain ").split()
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout) == shape(output)


@pytest.mark.workload
def test_what_the_doctor_is_shown_to_say_is_what_it_says(tmp_path):
    shown = next(block for block in BLOCKS if block.startswith("$ mptrain doctor model="))
    first, _, output = shown.partition("\n")
    done = run_in_process(*first.removeprefix("$ mptrain ").split(), cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    on_a_busy_machine = "note: only every second scale was tried: steps are slow\n"
    texts = (done.stdout.replace(on_a_busy_machine, ""), output)
    said, expected = (re.sub(r"[\d.]+(e-\d+)?", "#", text).split() for text in texts)
    assert said == expected


COMMANDS = sorted({tuple(words[1:]) for name in PAGES for words in commands(name) if words[0] == "mptrain"})


@pytest.mark.long
@each("words", [words for words in COMMANDS if words and "=" in words[0]])
def test_the_commands_that_are_shown_are_valid(words):
    assert compose(words).precision.name in README  # a mode that the first page does not name would be a secret


@pytest.mark.long
@each("words", [words for words in COMMANDS if words and words[0] in ("-m", "compare")])
def test_the_sweeps_and_comparisons_that_are_shown_are_valid(words):
    composer = composing.Composer()
    plain = [word for word in words[1:] if "=" in word]
    if plain and "--logs" not in words:  # comparisons of runs that exist have none
        points = expand(plain, composer.catalogue)
        assert len(validate(name_arms(points) if words[0] == "compare" else points, composer)) > 1


def test_every_recipe_is_in_the_table_and_has_a_page():
    folders = sorted(path.parent for path in recipes_folder().glob("*/recipe.yaml"))
    rows = sorted(re.findall(r"^\| \[`(\w+)`\]\(../recipes/", PAGES["docs/recipes.md"], re.MULTILINE))
    assert rows == [folder.name for folder in folders], "the table of docs/recipes.md has a row for each recipe"
    published = [folder for folder in folders if read_recipe(folder / "recipe.yaml").source.startswith("Micikevicius")]
    claims, questions = NUMBERS[len(published)], NUMBERS[len(folders) - len(published)]
    said = f"{claims.capitalize()} published claims, and\n{questions} questions around them, are [recipes]"
    assert said in PAGES["README.md"], "README.md: as many as there are recipes"
    for folder in folders:
        page = (folder / "README.md").read_text()
        for part in ("**Claim.**", "**Source.**", "**Cost.**", "cannot show"):
            assert part in page, f"recipes/{folder.name}/README.md: say {part}"


def test_the_recipe_that_is_shown_is_one(tmp_path):
    shown = next(
        block
        for block in re.findall(r"```yaml\n(.*?)```", PAGES["docs/recipes.md"], flags=re.DOTALL)
        if "expect:" in block
    )
    (tmp_path / "recipe.yaml").write_text(shown)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert len(recipe_points(recipe)) == 16


@pytest.mark.parametrize("page", ["README.md", "docs/precision.md"])
def test_every_precision_mode_is_in_the_table(page):
    modes = {path.stem for path in (configs_folder() / "precision").glob("*.yaml")}
    table = PAGES[page].partition("| mode | parameters |")[2].partition("\n\n")[0]
    rows = [name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(rows) == sorted(modes), f"the table of precision modes in {page} has each of configs/precision once"


@pytest.mark.workload
def test_the_package_of_ones_own_that_is_shown_trains(tmp_path):
    for kind, code in re.findall(r"```(python|yaml)\n(.*?)```", PAGES["docs/bring-your-own.md"], flags=re.DOTALL):
        named = re.search(r"^# (my\S+\.(?:py|yaml))", code, flags=re.MULTILINE)
        assert named, f"a block of {kind} does not say which file it is"
        (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / named[1]).write_text(code)
    (tmp_path / "my_configs/task").mkdir()
    (tmp_path / "my_configs/task/regress.yaml").write_text("_target_: mypackage.regress.Regress\n")
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    rows[:, 2] = rows[:, 0] - rows[:, 1]
    (tmp_path / "rows.csv").write_text("".join(f"{a:.4f},{b:.4f},{c:.4f}\n" for a, b, c in rows.tolist()))
    words = ("--config-dir", "my_configs", "extensions.allow=[mypackage.*]", "precision=fp16_dynamic")

    def train(*more):
        done = run_command(*words, *more, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    train("model=line", "run.name=r")
    assert json.loads((tmp_path / "outputs/r/summary.json").read_text())["metric"] < 0.1
    assert "mypackage.signs.Signs" in train("model=line", "optimizer=signs", "train.epochs=1")
    train("model=mine", "train.max_steps=2")
    said = train("dataset=birds", "model=cnn", "train.max_steps=2")
    assert "birds, 160 train, 20 val, 20 test, 3x16x16 float32, 4 classes" in said


def anchors(page):
    """Return the names by which the headings of a page are linked to, as forges make them."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    text = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / name if not path else (ROOT / name).parent / path
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{name}: {link} has no such heading"


PACKAGES = "api cli config engine integrations lab logger numerics optimizer parallel precision report run runlog scaler schedule study system workloads"


@pytest.mark.parametrize("name", PAGES)
def test_modules_that_are_named_exist(name):
    folders = PACKAGES.replace(" ", "|")
    named = re.findall(rf"`(?:mptrain/)?((?:{folders})/[\w/]+\.py)`", PAGES[name])
    missing = [path for path in named if not (ROOT / "mptrain" / path).exists() and not re.search("[A-Z]{4}", path)]
    assert not missing, f"{name} names {missing}"


def _definitions(tree):
    """Return the names that a module or class binds at its top, with the nodes of classes and functions."""
    names = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            names[ast.unparse(node.target)] = node
        elif isinstance(node, ast.Assign):
            names |= dict.fromkeys(
                (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)), node
            )
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name: node for alias in node.names}
    return names


def _resolves(name):
    """Return whether a dotted name is a module of mptrain, or a definition in one, or one in a class of it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file():
            scope = ast.parse(path.read_text(encoding="utf-8"))
            for part in parts[count:]:
                found = _definitions(scope).get(part)
                if found is None:
                    return count == 1 and parts[1] in shelves.FUNCTIONS
                scope = found if isinstance(found, ast.ClassDef) else ast.Module([], [])
            return True
    return False


def test_names_in_docstrings_and_pages_are_those_of_modules_and_definitions():
    files = [*(ROOT / "mptrain").rglob("*.py"), *(ROOT / "mptrain").rglob("*.md"), *(ROOT / name for name in PAGES)]
    names = {
        name: file
        for file in files
        for name in re.findall(r"`(mptrain(?:\.\w+)+)[`(]", file.read_text(encoding="utf-8"))
    }
    assert len(names) > 100
    wrong = {name: file.name for name, file in names.items() if not _resolves(name)}
    assert wrong == {}


def test_every_page_can_be_reached_from_the_first_one():
    reached, left = set(), ["README.md"]
    while left:
        name = left.pop()
        if name in reached or name not in PAGES:
            continue
        reached.add(name)
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[name]):
            path = (ROOT / name).parent / link
            if path.exists():
                left.append(path.resolve().relative_to(ROOT).as_posix())
    missing = sorted(PAGES.keys() - reached)
    assert not missing, f"link to {missing} from a page that is linked to"


@pytest.mark.parametrize(("name", "most"), [("README.md", 250), ("mptrain/README.md", 120)])
def test_first_pages_are_short(name, most):
    lines = len(PAGES[name].splitlines())
    assert lines <= most, f"{name} has {lines} lines: move what few readers need into docs/"


@pytest.mark.process
def test_the_python_that_is_shown_runs(tmp_path, monkeypatch, capsys):
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGES["docs/python.md"], flags=re.DOTALL))
    code = code.replace('"run.name=trial"', '"run.name=trial", "train.max_steps=2"')
    injected = ("inject.step=2", "inject.tensor=input", "inject.value=nan")
    words = (*TINY, "precision=fp16_dynamic", "train.max_steps=3", "run.name=nightly")
    done = run_in_process(*words, *injected, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[-1] == "2 main 65536.0"


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text())
    listed = re.findall(r"[\w/-]+\.md", str(site["nav"]))
    pages = [name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")]
    pages += [name for name in PAGES if "/" not in name and name != "README.md"]
    assert sorted(listed) == sorted(pages), "name every page of docs/ and of the root in nav of docs/site/mkdocs.yml"


@pytest.mark.process
def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("material", reason="needs mptrain[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "design/index.html").exists()
    assert 'href="repository/mptrain/index.html#where-a-new-thing-goes"' in (tmp_path / "CONTRIBUTING.html").read_text()


@each(
    ("page", "group"),
    [("docs/scalers.md", "scaler"), ("docs/precision.md", "precision"), ("docs/workloads/README.md", "model")],
)
def test_a_page_names_every_option_of_its_group(page, group):
    options = {path.stem for path in (configs_folder() / group).glob("*.yaml")} - {"torchvision", "timm"}
    named = set(re.findall(r"[\w.]+", PAGES[page]))
    missing = options - named
    assert not missing, f"{page} does not name {missing}, options of {group}"
