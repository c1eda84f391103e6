"""The process behind `tpu.compiled` for kernels: it has libtpu on its path and its dumps set before jax starts.

Arguments are the folder of dumps and names of configurations; JSON goes to the last line of standard output.
"""

import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from tests.tools.tpu import CHIPS, Records
from tests.tools.tpu_shapes import CONFIGURATIONS

KERNELS = "decode_attention|encode|decode|roundtrip"
"""Names of the kernels in dumps."""


def compile_for(chip: str, function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """`jax.jit(function)` of shapes, for a TPU that is described, not present."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices[0]
    there = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments)
    return jax.jit(function).lower(*shapes).compile()


def main(dumps: Path, names: list[str]) -> Records:
    return {name: {chip: _record(dumps, chip, name) for chip in CHIPS} for name in names or CONFIGURATIONS}


def _record(dumps: Path, chip: str, name: str) -> dict[str, Any]:
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    function, arguments = CONFIGURATIONS[name]()
    try:
        compiled = compile_for(chip, function, *arguments)
    except Exception as error:  # of many kinds
        return {"error": " ".join(str(error).split())[:400]}
    memory = compiled.memory_analysis()
    depths, blocks = _bundles(dumps)
    return {
        "code": memory.generated_code_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "step": depths[1],
        "head": depths[2],
        "blocks": blocks,
    }


def _bundles(dumps: Path) -> tuple[Counter[int], int]:
    """Counts instructions of the kernel by the depth of their loop, and bytes of its blocks in VMEM, two of each."""
    name = re.compile(rf"\d+-({KERNELS})(\.\d+)?-\d+-final_bundles.txt")
    (path,) = [path for path in dumps.iterdir() if name.fullmatch(path.name)]
    text = path.read_text()
    windows = re.findall(r"The window shape is [a-z]+(\d+)\[([\d,]*)\]", text)
    blocks = sum(int(bits) // 8 * math.prod(map(int, shape.split(","))) for bits, shape in windows)
    lines = [line for line in text.splitlines() if re.match(r"\s*(0x[0-9a-f]+|0)\s.*:", line)]
    return Counter(line[: line.find("{")].count(">") for line in lines), blocks


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
