"""Who is in the pools: worker records with leases, in memory or in Redis."""
