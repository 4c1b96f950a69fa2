"""Generated from proto/rocketstore; see proto/generate.sh."""
