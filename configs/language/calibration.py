"""Fitting to a model of 3 billion parameters: seconds a layer, and memory, which does not grow with their number.

Claim: all 28 layers and 8 heads of Llama 3.2 3B in minutes on two cores (28 times the seconds of one; two and four were
measured). Most of the time is the model's own, which reads the text once; weights are random.

    python -m experiments.run --config=configs/language/calibration.py

Each row runs twice, so that the second time nothing is compiled. Ten minutes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "calibration",
            "tokens": 8192,
            "context": 2048,
            "grid": {
                "model": ("Llama 3.2 3B",),
                "strategy": ("eden_2+turned", "klt_trellis_2+pre_rope", "klt_joint_2+centered+pre_rope"),
                "layers": (2, 4),
            },
        }
    )
