"""The Weave trace server of the published wheel, over HTTP, with the rules that production applies.

Run in an environment made from `requirements.txt`. It keeps everything in memory.
"""
