"""The wheel is complete: README's examples run with it outside the checkout, and a checker sees types."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    source, site = folder / "source", folder / "site"
    for name in ("rqjax", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(line, check=True, capture_output=True)
    (wheel,) = folder.glob("rqjax-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def test_the_wheel_holds_documents_and_no_notes(site):
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {"rqjax/py.typed", "rqjax/codebooks/trellis_tables.npz", "rqjax/README.md", "rqjax/docs/cache.md"} <= files
    assert [name for name in files if name.endswith("NOTES.md")] == []
    (info,) = site.glob("rqjax-*.dist-info")
    assert {path.name for path in site.iterdir()} == {"rqjax", "pallas_kernels", info.name}
    assert f"version = {{{info.stem.removeprefix('rqjax-')}}}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples_run_outside_the_checkout(example, site, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{EXAMPLES[example]}\nprint(rqjax.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith(str(site))
    assert len(done.stdout.splitlines()) == code.count("print(")


def test_a_checker_sees_types(site, tmp_path):
    code = "import jax\nimport rqjax\n\nreveal_type(rqjax.eden(jax.random.key(0), 64, 3).dim)\n"
    (tmp_path / "use.py").write_text(code)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": ["use.py"], "extraPaths": [str(site)]}))
    line = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'is "int"' in done.stdout, done.stdout
