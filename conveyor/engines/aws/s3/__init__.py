"""Blobs of the AWS engine, on S3."""
