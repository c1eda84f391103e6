"""K-means: its first centroids, and centroids that no vector is nearest to."""

import jax
import jax.numpy as jnp
import numpy as np

from rqjax.arrays.kmeans import lloyd
from rqjax.quantizers.exact import Exact
from rqjax.search import cells


def test_centroids_without_vectors_move_to_the_farthest():
    x = jnp.array([[0.0], [1.0], [2.0], [10.0], [11.0]])
    np.testing.assert_allclose(lloyd(x, jnp.zeros((3, 1)), 1)[:, 0], [4.8, 11, 10])


def test_each_of_clusters_far_apart_has_a_centroid():
    """K-means finds all clusters. Random vectors, one a cluster, would leave a third of them without a centroid."""
    rng = np.random.default_rng(0)
    centers = 100 * rng.standard_normal((12, 16))
    x = (centers[rng.integers(0, 12, 768)] + rng.standard_normal((768, 16))).astype(np.float32)
    found, _ = cells.learned(jax.random.key(0), x, 12, 768, "ip", Exact(16), residual=False)
    distances = np.linalg.norm(centers[:, None] - np.asarray(found.centroids), axis=2)
    np.testing.assert_array_less(distances.min(axis=1), 5)
