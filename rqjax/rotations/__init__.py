"""Rotations: pytrees with `__call__` and `inverse`, no quantizer in them. `Dense.haar`, and `random` of other
classes, take a key and a dimension."""

from rqjax.rotations.butterfly import StridedRotor as StridedRotor, butterfly as butterfly
from rqjax.rotations.chain import Chain as Chain, Permutation as Permutation
from rqjax.rotations.dense import Dense as Dense
from rqjax.rotations.givens import Givens as Givens
from rqjax.rotations.hadamard import Hadamard as Hadamard
from rqjax.rotations.identity import Identity as Identity
from rqjax.rotations.multivector import MultivectorRotor as MultivectorRotor
from rqjax.rotations.protocol import Rotation as Rotation, orthogonality_error as orthogonality_error
from rqjax.rotations.quaternion import Quaternion as Quaternion
from rqjax.rotations.rope import Rope as Rope
from rqjax.rotations.rotor import Rotor as Rotor
