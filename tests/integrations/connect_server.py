"""A server of Spark Connect with two slots, in a process of its own: prints its port, and ends with its input."""

import sys

from integrations.spark_sessions import end_java, session

if __name__ == "__main__":
    own = session(
        "local[2,4]",
        **{
            "plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "connect.grpc.binding.address": "127.0.0.1",
            "connect.grpc.binding.port": "0",
        },
    )
    service = getattr(own._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    print(getattr(service, "MODULE$").localPort(), flush=True)
    sys.stdin.read()
    own.stop()
    end_java()
