"""Buckets: credentials, retries, rate limits, listings, uploads and server-side copies of GCS and S3. Begin with `cloud`."""
