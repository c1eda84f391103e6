"""Training of quantizers by optax."""

from rqjax.learning.parameters import parameters as parameters
from rqjax.learning.training import fit as fit
