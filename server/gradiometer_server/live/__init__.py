"""The live feed: what the fold has just done, to every browser that asked, at the browser's own pace."""
