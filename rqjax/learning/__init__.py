"""Training of quantizers by optax."""

from rqjax.learning.training import fit as fit
