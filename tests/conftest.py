"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# As workers have it, and before anything loads OpenMP: where other processes want the cores, threads that
# spin at each barrier made a step of the real model ten times longer.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")
