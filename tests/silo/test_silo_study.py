"""A study over gateways is the same study in one process, for the same seeds."""

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo
from tests.silo import hospitals
