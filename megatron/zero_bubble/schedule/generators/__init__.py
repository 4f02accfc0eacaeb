"""Generators of the named schedules that do not depend on costs; each module generates one family of schedules."""
