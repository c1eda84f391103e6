"""Cost of a mean in common for a search: codes of vectors as they are, and after their mean is subtracted.

Claim: 4 bytes a vector and no recall, since an index subtracts it where codes then err less. It has 0.10 of the norm of
WordLlama's unit vectors and 0.41 of the passages'. On the passages at 1 bit `eden_unbiased` finds 0.79 of the ten
nearest, as it does with the metric "l2" and as FAISS's RaBitQ does. Encoders whose mean is larger than the spread are
not here: `rqjax/search/NOTES.md` has such vectors.

    python -m experiments.run --config=configs/search/recall_centered.py

The nearest by inner product, cosine or distance are the same, since all are unit vectors. ":l2" ranks by distance,
which takes 4 bytes more where no mean is subtracted; `faiss_rabitq` and `faiss_eden` subtract the mean, and rank by
inner product. Recall as in `configs/search/recall_real.py`. Needs the extras `bench` and `real`.
"""

from ml_collections import ConfigDict

from configs.search import recall_real


def get_config() -> ConfigDict:
    config = recall_real.get_config()
    codecs = ("eden_unbiased", "eden_unbiased:l2", "faiss_rabitq", "faiss_eden")
    config.update({"grid": {"bits": (1, 2), "codec": codecs}})
    return config
