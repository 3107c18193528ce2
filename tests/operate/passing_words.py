"""A line for each form of words by which an exception is known that may pass by itself, and some others."""

from __future__ import annotations

PASSING = """
    ReadTimeout: x
    requests.exceptions.ConnectionError: x
    a.b.ServerDisconnected: x
    HostUnreachable: x
    ServiceUnavailable
    MaxRetryError: x
    ClientConnectorError: x
    ClientPayloadError: x
    ResponseStreamingError: x
    SSLEOFError: x
    socket.gaierror: x
    IncompleteRead(5 bytes read)
    RemoteProtocolError: x
    ChunkedEncodingError: x
    E: cannot connect to x
    E: can't connect
    E: couldn't connect
    E: could not connect
    E: Unable to connect
    E: trying to connect
    E: Failed to connect
    E: Connect call failed
    E: connection failed
    E: connections broken
    E: Could not resolve host
    E: host is unreachable
    E: network unreachable
    E: server unreachable
    E: service unreachable
    E: endpoint is unreachable
    E: error sending request
    E: it timed out
    E: it timedout
    E: Timeout was reached
    E: timeout of 30 s exceeded
    E: timeout of 1.5s exceeded
    E: not within the specified time
    E: deadline exceeded
    E: DEADLINE_EXCEEDED
    E: deadline has elapsed
    E: after 5 retries
    E: max retries
    E: maximum retries
    E: temporarily unavailable
    E: service unavailable
    E: status: unavailable
    E: Try again
    E: server busy
    E: the server is busy
    E: slow down
    E: SlowDown
    E: reduce your request
    E: indicates throttling
    E: Internal Server Error
    E: 500 a Backend Error
    E: 502 a Backend Error
    E: 503 a Backend Error
    E: 504 a Backend Error
    E: 500 Server Error
    E: 502 Bad Gateway
    E: 504 Gateway Time-out
    E: 504 Gateway Timeout
    E: 429 Too Many Requests
    E: 503 GET x
    E: 503 HEAD x
    E: 503 PUT x
    E: 503 POST x
    E: 503 PATCH x
    E: 429 DELETE x
    E: status code: 503
    E: status=429
    E: "statuscode": 500
    E: status (504)
    E: StatusCode.UNAVAILABLE
    E: curlCode: 6
    E: curlCode: 7
    E: curlCode: 28
    E: curlCode: 35
    E: curlCode: 52
    E: curlCode: 55
    E: curlCode: 56
    E: OperationTimedOut
"""
OF_STORES = """
    E: AWS Error NETWORK_CONNECTION
    E: AWS Error SLOW_DOWN
    E: AWS Error INTERNAL_FAILURE
    E: AWS Error SERVICE_UNAVAILABLE
    E: AWS Error REQUEST_TIMEOUT
    awscrt.E: AWS_ERROR_S3_INTERNAL_ERROR
    awscrt.E: AWS_ERROR_S3_SLOW_DOWN
    awscrt.E: AWS_ERROR_S3_REQUEST_TIMEOUT
    awscrt.E: AWS_ERROR_HTTP_RESPONSE_FIRST_BYTE_TIMEOUT
    awscrt.E: AWS_IO_SOCKET_CLOSED
    botocore.E: An error occurred (503) when
    botocore.E: An error occurred (InternalError) when
    botocore.E: An error occurred (ServiceUnavailable) when
    botocore.E: An error occurred (RequestTimeout) when
    botocore.E: An error occurred (Throttling) when
    botocore.E: An error occurred (SlowDown) when
    E: S3 try again
    E: GCS try again
    E: azure try again
    E: blob try again
    E: bucket try again
    E: put object try again
    E: GetObject try again
    E: UploadPart try again
    E: storage try again
    FSTimeoutError: x
    E: ServiceException: try again
    E: gs://b try again
    E: az://b try again
    E: abfss://b try again
    E: abfs://b try again
    E: oss://b try again
    E: oss2 try again
    E: object_storage try again
    E: reduce your request rate
    E: Failed to copyto: try again
    E: Failed to copy: try again
    E: S3UploadException try again
    E: S3Error try again
    E: google.resumable_media try again
    E: awscrt try again
    E: s3transfer try again
    E: swiftclient try again
    E: googleapis try again
    E: gcsfs try again
    E: s3fs try again
    E: botocore try again
    E: boto3 try again
    E: fsspec try again
    E: minio try again
    E: hdfs try again
"""
LASTING = """
    ValueError: timeout of 30 s exceeded the configured maximum
    KeyError: 503
    E: 403 Forbidden
    E: 501 Server Error
    E: 505 Server Error
    E: status 404
    E: curlCode: 22
    E: An error occurred (AccessDenied) when
    MyTimeoutish thing
"""
