"""Static checks of a plugin's source, for `hookd plugin check`.

Neither the plugin nor torch is imported.
"""
