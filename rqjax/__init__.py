"""rqjax: vector quantization of key-value caches and embeddings in JAX."""

from rqjax import (
    clifford as clifford,
    codebooks as codebooks,
    learning as learning,
    losses as losses,
    metrics as metrics,
    packing as packing,
    rotations as rotations,
    theory as theory,
)
from rqjax.affine import Affine as Affine
from rqjax.attention import attend as attend, dot_product_attention as dot_product_attention
from rqjax.budget import BUDGETED as BUDGETED, fit_under_budget as fit_under_budget
from rqjax.cache import KVCache as KVCache, append as append, grow as grow
from rqjax.columns import Columns as Columns
from rqjax.combinators import (
    Centered as Centered,
    Normalized as Normalized,
    Residual as Residual,
    Rotated as Rotated,
    Scaled as Scaled,
    Split as Split,
)
from rqjax.exact import Exact as Exact
from rqjax.exchange import Exchange as Exchange
from rqjax.fitted import (
    FITTED as FITTED,
    lopq as lopq,
    opq as opq,
    pq as pq,
    qet as qet,
    rotor_chain_learned as rotor_chain_learned,
    rotorquant_allocated as rotorquant_allocated,
    rotorquant_allocated_trellis as rotorquant_allocated_trellis,
    rotorquant_learned as rotorquant_learned,
)
from rqjax.gain import Gain as Gain
from rqjax.index import Index as Index
from rqjax.klt import klt_trellis as klt_trellis
from rqjax.learning import fit as fit
from rqjax.local import Local as Local
from rqjax.methods import (
    METHODS as METHODS,
    affine as affine,
    affine_rotated as affine_rotated,
    affine_rotated_sign as affine_rotated_sign,
    eden as eden,
    eden_unbiased as eden_unbiased,
    hadamard as hadamard,
    identity as identity,
    isoquant as isoquant,
    planarquant as planarquant,
    rotor_chain as rotor_chain,
    rotorquant as rotorquant,
    rotorquant_paper as rotorquant_paper,
    rotorquant_paper_prod as rotorquant_paper_prod,
    rotorquant_prod as rotorquant_prod,
    rotorquant_trellis as rotorquant_trellis,
    rtn as rtn,
    turboquant as turboquant,
    turboquant_mixed as turboquant_mixed,
    turboquant_prod as turboquant_prod,
    turboquant_prod_orthogonal as turboquant_prod_orthogonal,
    turboquant_trellis as turboquant_trellis,
    turboquant_trellis_unbiased as turboquant_trellis_unbiased,
)
from rqjax.ops import decode as decode, encode as encode, roundtrip as roundtrip
from rqjax.per_head import PerHead as PerHead
from rqjax.product import Product as Product
from rqjax.pytree import pytree as pytree, static as static
from rqjax.quantizer import Codes as Codes, Quantizer as Quantizer, nbytes as nbytes
from rqjax.scalar import Scalar as Scalar, lloyd_max as lloyd_max
from rqjax.sign import Sign as Sign
from rqjax.storage import load as load, save as save
from rqjax.strategies import STRATEGIES as STRATEGIES, Strategy as Strategy, strategy as strategy
from rqjax.trellis import Trellis as Trellis, trellis_coded as trellis_coded
from rqjax.trellis_columns import TrellisColumns as TrellisColumns
from rqjax.uniform import Uniform as Uniform
