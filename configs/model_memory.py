"""A 3B-parameter checkpoint, made on the spot, loads and makes a token within 16 GB on two cores, in bfloat16.

    python -m experiments.run --config=configs/model_memory.py

Tokens one by one; a prompt of 16 at once takes 20 GB, see WORKSPACE_NOTES.md. Needs 7 GB in the folder for temporary
files.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict({"experiment": "model_memory", "grid": {"model": ("Llama 3.2 3B",), "strategy": ("v3_4",)}})
