"""A study as small as can be."""

import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo


def mean(y):
    location = numpyro.sample("mean", dist.Normal(0, 10))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(location, 1), obs=y)


study = silo.Study(
    model=mean,
    hospitals={"north": 200, "south": 300},
    records={"y": ((), "float32")},
    budget=dppvi.PrivacyBudget(1.0),
)
