"""rqjax: vector quantization of key-value caches and embeddings in JAX.

    q = rqjax.eden(jax.random.key(0), dim=128, bits=3)    a quantizer: a pytree, random but for its dimension and bits
    codes = q.encode(x)                                   also decode(codes), dot(y, codes), bits_per_vector

Recipes, by what is known of the vectors
    METHODS, of nothing: eden eden_unbiased turboquant turboquant_mixed turboquant_prod turboquant_prod_orthogonal
        rotorquant rotorquant_prod rotorquant_paper rotorquant_paper_prod rotor_chain hadamard planarquant isoquant
        identity rtn affine affine_rotated affine_rotated_sign
        turboquant_trellis turboquant_trellis_unbiased rotorquant_trellis nested_e8
    FITTED, of samples: klt_trellis klt_joint rotorquant_learned rotor_chain_learned rotorquant_allocated
        rotorquant_allocated_trellis pq opq lopq qet oscar
    BUDGETED, of the very matrix: fit_under_budget
Operations on any quantizer
    encode decode roundtrip straight_through nbytes save load
Keys and values
    STRATEGIES strategy Strategy KVCache Rope append attend dot_product_attention grow truncate requantize PagedCache
    AsGiven SubtractedMean TurnedMean BeforeRope, forms of keys; LastPart, of values
    rqjax.nn for flax
Nearest neighbors
    Index
Training
    fit parameters losses learning
Parts, which nest
    Normalized Scaled Gain Centered Rotated Residual Split PerHead AcrossHeads GivenKeys PerChannel Balanced Clipped
    PerCell Scalar lloyd_max Affine MinMax Uniform Formats PerCoordinate Trellis trellis_coded TrellisPerCoordinate
    BestGain NestedE8 Product Exchange Exact Sign
    rotations codebooks packing
Parts of your own
    Quantizer Wrapper Codes pytree static
What is measured, and bounds for it
    metrics theory
Kernels, and errors
    kernels Unsupported UnknownName extras

The guide is rqjax/README.md and rqjax/docs; help(rqjax.eden), say, tells more of each name.
"""

from rqjax import backends as kernels, codebooks, learning, metrics, rotations, theory
from rqjax.arrays import packing
from rqjax.cache.append import append, grow
from rqjax.cache.attention import attend, dot_product_attention
from rqjax.cache.key_forms import AsGiven, BeforeRope, SubtractedMean, TurnedMean
from rqjax.cache.kv import KVCache, LastPart
from rqjax.cache.requantize import requantize
from rqjax.cache.strategy import Strategy
from rqjax.cache.truncate import truncate
from rqjax.core import extras
from rqjax.core.dispatch import Unsupported
from rqjax.core.pytree import pytree, static
from rqjax.core.quantizer import Codes, Quantizer, Wrapper, decode, encode, nbytes, roundtrip, straight_through
from rqjax.core.registry import UnknownName
from rqjax.learning import losses
from rqjax.learning.parameters import parameters
from rqjax.learning.training import fit
from rqjax.paging.paged import PagedCache
from rqjax.quantizers.across_heads import AcrossHeads, GivenKeys
from rqjax.quantizers.affine import Affine, MinMax
from rqjax.quantizers.balanced import Balanced
from rqjax.quantizers.clipped import Clipped
from rqjax.quantizers.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
from rqjax.quantizers.exact import Exact
from rqjax.quantizers.exchange import Exchange
from rqjax.quantizers.formats import Formats
from rqjax.quantizers.gain import Gain
from rqjax.quantizers.nested_e8 import NestedE8
from rqjax.quantizers.per_cell import PerCell
from rqjax.quantizers.per_channel import PerChannel
from rqjax.quantizers.per_coordinate import PerCoordinate
from rqjax.quantizers.per_head import PerHead
from rqjax.quantizers.product import Product
from rqjax.quantizers.scalar import Scalar, lloyd_max
from rqjax.quantizers.trellis import Trellis
from rqjax.quantizers.trellis_per_coordinate import BestGain, TrellisPerCoordinate, trellis_coded
from rqjax.quantizers.uniform import Uniform
from rqjax.recipes.budget import BUDGETED, fit_under_budget
from rqjax.recipes.fitted import FITTED
from rqjax.recipes.joint import klt_joint
from rqjax.recipes.klt import klt_trellis
from rqjax.recipes.learned import (
    rotor_chain_learned,
    rotorquant_allocated,
    rotorquant_allocated_trellis,
    rotorquant_learned,
)
from rqjax.recipes.methods import (
    METHODS,
    affine,
    affine_rotated,
    affine_rotated_sign,
    eden,
    eden_unbiased,
    hadamard,
    identity,
    isoquant,
    nested_e8,
    planarquant,
    rotor_chain,
    rotorquant,
    rotorquant_paper,
    rotorquant_paper_prod,
    rotorquant_prod,
    rotorquant_trellis,
    rtn,
    turboquant,
    turboquant_mixed,
    turboquant_prod,
    turboquant_prod_orthogonal,
    turboquant_trellis,
    turboquant_trellis_unbiased,
)
from rqjax.recipes.oscar import oscar
from rqjax.recipes.sketches import Sign
from rqjax.recipes.strategies import STRATEGIES, strategy
from rqjax.recipes.vector_quantizers import lopq, opq, pq, qet
from rqjax.rotations import Rope
from rqjax.search.index import Index
from rqjax.storage import load, save

__version__ = "0.3.0"
# fmt: off
__all__ = [  # noqa: RUF022
    # In the order of the map above.
    "METHODS", "eden", "eden_unbiased", "turboquant", "turboquant_mixed", "turboquant_prod",
    "turboquant_prod_orthogonal", "rotorquant", "rotorquant_prod", "rotorquant_paper", "rotorquant_paper_prod",
    "rotor_chain", "hadamard", "planarquant", "isoquant", "identity", "rtn", "affine", "affine_rotated",
    "affine_rotated_sign", "turboquant_trellis", "turboquant_trellis_unbiased", "rotorquant_trellis", "nested_e8",
    "FITTED", "klt_trellis", "klt_joint", "rotorquant_learned", "rotor_chain_learned", "rotorquant_allocated",
    "rotorquant_allocated_trellis", "pq", "opq", "lopq", "qet", "oscar", "BUDGETED", "fit_under_budget",
    "encode", "decode", "roundtrip", "straight_through", "nbytes", "save", "load",
    "STRATEGIES", "strategy", "Strategy", "KVCache", "Rope", "append", "attend", "dot_product_attention", "grow",
    "truncate", "requantize", "PagedCache", "AsGiven", "SubtractedMean", "TurnedMean", "BeforeRope", "LastPart",
    "Index",
    "fit", "parameters", "losses", "learning",
    "Normalized", "Scaled", "Gain", "Centered", "Rotated", "Residual", "Split", "PerHead", "AcrossHeads", "GivenKeys",
    "PerChannel", "Balanced", "Clipped", "PerCell", "Scalar", "lloyd_max", "Affine", "MinMax", "Uniform", "Formats",
    "PerCoordinate", "Trellis", "trellis_coded", "TrellisPerCoordinate", "BestGain", "NestedE8", "Product", "Exchange",
    "Exact", "Sign", "rotations", "codebooks", "packing",
    "Quantizer", "Wrapper", "Codes", "pytree", "static",
    "metrics", "theory",
    "kernels", "Unsupported", "UnknownName", "extras",
]
# fmt: on
