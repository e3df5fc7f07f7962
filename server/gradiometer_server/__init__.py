"""Gradiometer's server: durable telemetry log, fold, alert rules, REST, live feed and the dashboard's files."""

__version__ = "0.1.0"
