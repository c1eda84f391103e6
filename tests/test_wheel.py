"""The wheel is complete: README's first example runs with it outside the checkout, and a checker sees types."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.full
def test_the_wheel_runs_the_quickstart(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("rqjax", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(line, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("rqjax-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        file.extractall(site)
    assert {"rqjax/py.typed", "rqjax/codebooks/trellis_tables.npz", "rqjax/README.md", "rqjax/docs/cache.md"} <= set(
        names
    )
    assert [name for name in names if name.endswith("NOTES.md")] == []
    assert {name.partition("/")[0] for name in names} == {
        "rqjax",
        "pallas_kernels",
        f"{wheel.stem.rsplit('-', 3)[0]}.dist-info",
    }
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n{example[1]}\nassert rqjax.__file__.startswith({str(site)!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Scaled(Rotated(Dense(128), Scalar(3 bits)))")
    (tmp_path / "use.py").write_text(
        "import jax\nimport rqjax\n\nreveal_type(rqjax.eden(jax.random.key(0), 64, 3).dim)\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": ["use.py"], "extraPaths": [str(site)]}))
    line = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'is "int"' in done.stdout, done.stdout
