"""Figures that the papers print, for the column beside the measured ones."""

QUANTIZE_US = {
    "dense": {1024: 69, 4096: 132, 8192: 285, 16384: 740},
    "rotor": {1024: 6, 4096: 12, 8192: 20, 16384: 39},
}
"""RotorQuant, Table 2: microseconds of quantizing and reconstructing vectors, 3 bits, d = 128, on an NVIDIA RTX PRO
4000 Blackwell: dense as PyTorch runs it, and its fused kernel."""

QUANTIZE_MS_M4 = {
    "dense": {1024: 0.764, 4096: 6.02, 16384: 21.94, 65536: 86.46},
    "rotor": {1024: 0.471, 4096: 0.650, 16384: 1.12, 65536: 2.76},
}
"""RotorQuant, Table 3: milliseconds of the same on a Mac mini M4, dense as PyTorch runs it, and its Metal shader."""

MSE = {
    "turboquant": {1: 0.361, 2: 0.116, 3: 0.034, 4: 0.009},
    "rotorquant_paper": {1: 0.457, 2: 0.197, 3: 0.081, 4: 0.032},
}
"""RotorQuant, Table 4: mean squared error of 2000 unit vectors, d = 128.

Its "RotorQuant" is `rotorquant_paper` here."""

INNER_PRODUCT = {
    "turboquant_prod": {3: (-0.000, 0.037, 0.918), 4: (0.001, 0.020, 0.974)},
    "rotorquant_paper_prod": {3: (0.001, 0.048, 0.878), 4: (-0.001, 0.031, 0.943)},
}
"""RotorQuant, Table 5: bias, RMSE and correlation of inner products of 3000 pairs of unit vectors, d = 128.

Its "RotorQuant" is `rotorquant_paper_prod` here."""

PARAMETERS = {
    "turboquant": {128: 16_399, 256: 65_540, 512: 262_148, 1024: 1_048_580, 4096: 16_777_220},
    "rotorquant": {128: 372, 256: 358, 512: 698, 1024: 1_382, 4096: 5_478},
}
"""RotorQuant, Table 1."""

CACHE = {4: (75.6, 3.8), 3: (57.6, 5.0), 2: (39.5, 7.3)}
"""RotorQuant, Table 7: MB and compression of Qwen2.5-3B's cache at 8K tokens; float16 takes 289.0 MB."""

CACHE_FLOAT16 = 289.0

KV_MEMORY = {
    "float16": (969, 1),
    "v2_lean": (266, 3.6),
    "v3_3.5": (236, 4.1),
    "v3_3": (207, 4.7),
    "v3_2.5": (177, 5.5),
}
"""TurboQuant MLX, cache of Llama 3.2 3B at T = 8192: MB of 10^6 bytes, compression. Buffers have 8448 tokens."""

TOKENS_PER_SECOND = {
    "float16": {512: 208, 1024: 199, 2048: 191, 4096: 175, 8192: 148},
    "v2_lean": {512: 188, 1024: 188, 2048: 184, 4096: 174, 8192: 156},
    "v2_rotated": {512: 135, 1024: 133, 2048: 131, 4096: 124, 8192: 115},
    "v2_rotated_qjl": {512: 101, 1024: 96, 2048: 84, 4096: 65, 8192: 45},
    "v3_3.5": {512: 82, 1024: 74, 2048: 59, 4096: 42, 8192: 24},
    "v3_3": {512: 98, 1024: 86, 2048: 70, 4096: 47, 8192: 27},
    "v3_2.5": {512: 83, 1024: 75, 2048: 59, 4096: 42, 8192: 24},
}
"""TurboQuant MLX: Llama 3.2 3B on an M4 Max, the whole model."""

ROTATIONS = {
    "identity": {"gaussian": 0.034, "outlier_channels": 0.313, "lognormal_channels": 0.220, "one_hot": 0.715},
    "dense": {"gaussian": 0.0339, "outlier_channels": 0.0345, "lognormal_channels": 0.0341, "one_hot": 0.0345},
    "hadamard": {"gaussian": 0.0340, "outlier_channels": 0.0305, "lognormal_channels": 0.0318, "one_hot": 0.0613},
    "hadamard_2": {"gaussian": 0.0339, "outlier_channels": 0.0334, "lognormal_channels": 0.0340, "one_hot": 0.0320},
    "rotor": {"gaussian": 0.0341, "outlier_channels": 0.231, "lognormal_channels": 0.126, "one_hot": 0.594},
    "rotor_5": {"gaussian": 0.0340, "outlier_channels": 0.061, "lognormal_channels": 0.048, "one_hot": 0.162},
    "rotor_10": {"gaussian": 0.0340, "outlier_channels": 0.039, "lognormal_channels": 0.034, "one_hot": 0.043},
    "hadamard_rotor": {
        "gaussian": 0.0339,
        "outlier_channels": 0.0313,
        "lognormal_channels": 0.0326,
        "one_hot": 0.0309,
    },
}
"""Relative mean squared errors at 3 bits, d = 128, from an independent NumPy program and no paper (5 draws)."""

QET_VS_PQ = {
    "synthetic_1": {("qet_vanilla", 4): 36.53, ("qet", 4): 6.94},
    "synthetic_2": {("qet_vanilla", 4): 36.51, ("qet", 4): 7.13},
    "synthetic_3": {("qet_vanilla", 4): 36.54, ("qet", 4): 7.21},
    "weights": {("qet_vanilla", 4): 36.64, ("qet", 4): 5.05},
    "keys": {("qet_vanilla", 4): 50.24, ("qet", 4): 13.33},
    "values": {("qet_vanilla", 4): 45.83, ("qet", 4): 11.89},
}
"""QET, section 4.2: mean squared error in % of PQ's by method and ratio. Its weights are Llama-2's, its keys and values
those of KVQuant, 4096 x 4096."""

QET_VS_VANILLA = {("qet_rqo", 4): 16.23, ("qet_cqo", 4): 40.08}
"""QET, section 4.3, on Llama-2's weights: % of vanilla."""

QET_RANGE_AND_SHARE = {4: (1.6, 87.5), 8: (4.0, 78.1), 12: (9.2, 71.8)}
"""QET, Table 1: by ratio, the range of what is left in % of the matrix's, and the codebook's share in %."""

QET_RTN = {
    "synthetic_1": 71.74,
    "synthetic_2": 334.59,
    "synthetic_3": 247.39,
    "weights": 12.56,
    "keys": 10.57,
    "values": 7.69,
}
"""QET, section 4.2: RTN's mean squared error as a multiple of QET's, mean over ratios from 2 to 16."""

INDEXING = {
    "faiss_pq": {200: 37.04, 1536: 239.75, 3072: 494.42},
    "faiss_rabitq": {200: 597.25, 1536: 2267.59, 3072: 3957.19},
    "turboquant": {200: 0.0007, 1536: 0.0013, 3072: 0.0021},
}
"""TurboQuant, Table 2: seconds to index 100k vectors at 4 bits. PQ and RaBitQ, its own, ran on CPUs, TurboQuant on a
GPU."""

PERPLEXITY_CHANGE = {
    "v2_rotated_qjl": "+5.3, +7.8, +5.1, -1.1",
    "v2_rotated": "-0.8, +1.4, +1.4, +2.9",
    "v2_lean": "+0.6, +4.0, +1.2, +1.6",
    "v3_3.5": "+0.3, +6.7, +4.0, +2.1",
    "v3_3.25": "+4.8, +8.3, +5.6, +4.6",
    "v3_3": "+5.1, +8.6, +7.0, +6.2",
    "v3_2.75": "+15.5, +18.4, +7.9, +14.0",
    "v3_2.5": "+27.0, +35.2, +10.8, +7.0",
    "v3_2": "+64.3, +65.5, +19.3, +20.2",
    "turboquant_prod_3": "+50.5",
}
"""TurboQuant MLX, "Multi-Model Quality": change of the perplexity in %, with weights of 4 bits. The order is Llama 3.2
3B, Llama 3.1 8B, Mistral 7B, Gemma 3 4B; the section on QJL has Llama 3.2 3B alone."""

FIDELITY = {
    ("turboquant_3", 2048): "0.9906, 0.812, 0.938",
    ("rotorquant_3", 2048): "0.9903, 0.812, 0.938",
    ("turboquant_3", 4096): "0.9875, 0.812, 0.875",
    ("rotorquant_3", 4096): "0.9870, 0.812, 0.938",
    ("turboquant_4", 4096): "0.9880, 0.750, 0.938",
    ("rotorquant_4", 4096): "0.9874, 0.812, 0.938",
}
"""RotorQuant, Table 6: cosine, top-1 and top-5 of Qwen2.5-3B-Instruct's attention, by strategy and context. Shares are
sixteenths."""
