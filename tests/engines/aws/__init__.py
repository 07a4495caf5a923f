"""Tests of the AWS engine: signatures, metering, retries, and two transports that agree."""
