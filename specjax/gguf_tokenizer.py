def stop_ids(metadata): return ()
