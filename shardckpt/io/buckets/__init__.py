"""GCS and S3 buckets: credentials, retries, rate limits, listings, uploads, server-side copies.

The module to begin with is `cloud`.
"""
