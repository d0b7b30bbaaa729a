"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")
