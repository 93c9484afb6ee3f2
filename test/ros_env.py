"""Keeps every ROS test on this machine and in a domain of its own."""
from __future__ import annotations

import os

os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'


def isolated(offset: int = 0) -> dict[str, str]:
    """Return an environment for child processes: localhost only, a domain by process id."""
    domain = 1 + (os.getpid() + offset) % 100
    return {**os.environ, 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
            'ROS_DOMAIN_ID': str(domain)}
