"""The fingerprints that the daemon keeps: one for each target with the plugin `fingerprint`."""
