{{- define "latentray.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser | int64 }}
runAsGroup: {{ .Values.podSecurity.runAsUser | int64 }}
fsGroup: {{ .Values.podSecurity.fsGroup | int64 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "latentray.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.podSecurity.readOnlyRootFilesystem }}
capabilities:
  drop: [ALL]
{{- end }}

{{/* Of every pod of the release, whatever it runs. */}}
{{- define "latentray.podBasics" -}}
serviceAccountName: {{ include "latentray.serviceAccount" . }}
automountServiceAccountToken: false
# A Service named latentray would put LATENTRAY_PORT=tcp://... into the environment, which are our settings.
enableServiceLinks: false
securityContext:
  {{- include "latentray.podSecurityContext" . | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What is writable where the image is not. */}}
{{- define "latentray.scratchMounts" -}}
- name: scratch
  mountPath: /tmp
  subPath: tmp
- name: scratch
  mountPath: /home/latentray
  subPath: home
{{- end }}

{{- define "latentray.baseEnv" -}}
- name: HOME
  value: /home/latentray
- name: USER
  value: latentray
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/*
A pod template for KubeRay. dict:
root; pod: the values of the role; component; labels: further ones; accelerator; data: mount the batch files;
serves: runs serve.sh, with its ports and probes; outlasts: ends after the servers, when all are ended together.
*/}}
{{- define "latentray.rayPod" -}}
{{- $root := .root -}}
{{- $pod := .pod -}}
{{- $accelerator := .accelerator | default "none" -}}
{{- $scheme := ternary ", scheme: HTTPS" "" (ne $root.Values.access.tlsSecret "") -}}
metadata:
  labels:
    {{- with $pod.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "latentray.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- with $pod.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    checksum/config: {{ printf "%s\n%s" (include "latentray.configFile" $root) ($root.Files.Get "files/serve.sh") | sha256sum }}
    {{- if .serves }}
    # KubeRay leaves the command alone, and tells its own in KUBERAY_GEN_RAY_START_CMD.
    ray.io/overwrite-container-cmd: "true"
    {{- end }}
spec:
  {{- include "latentray.podBasics" $root | nindent 2 }}
  {{- if .serves }}
  # the sleep before SIGTERM, the drain, and the end of gateway, shards and the Ray node
  terminationGracePeriodSeconds: {{ add $pod.endpointSeconds $pod.drainSeconds 30 }}
  {{- else if .outlasts }}
  terminationGracePeriodSeconds: {{ add $root.Values.server.endpointSeconds $root.Values.server.drainSeconds 60 }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml . | nindent 6 }}
      labelSelector:
        matchLabels:
          {{- include "latentray.selectorLabels" $root | nindent 10 }}
          app.kubernetes.io/component: {{ $.component }}
          {{- with $.labels }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    {{- end }}
  {{- end }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: latentray
      image: {{ include "latentray.image" (dict "root" $root "accelerator" $accelerator) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if .serves }}
      command: [/bin/bash, /etc/latentray/serve.sh]
      {{- end }}
      securityContext:
        {{- include "latentray.containerSecurityContext" $root | nindent 8 }}
      env:
        {{- include "latentray.baseEnv" $root | nindent 8 }}
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        {{- if .serves }}
        - name: LATENTRAY_CONFIG
          value: /etc/latentray/latentray.yaml
        - name: DRAIN_SECONDS
          value: {{ $pod.drainSeconds | quote }}
        - name: STARTUP_SECONDS
          value: {{ $pod.startupSeconds | quote }}
        {{- end }}
      ports:
        {{- if eq .component "head" "batch-head" }}
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        {{- end }}
        # Ray's own metrics; KubeRay starts Ray with this port
        - name: metrics
          containerPort: 8080
        {{- if .serves }}
        - name: grpc
          containerPort: {{ include "latentray.grpcPort" $root }}
        - name: http
          containerPort: {{ include "latentray.httpPort" $root }}
        {{- if include "latentray.metricsPort" $root }}
        - name: http-metrics
          containerPort: {{ include "latentray.metricsPort" $root }}
        {{- end }}
        {{- end }}
      {{- if .serves }}
      # The model loads for minutes; nothing else is asked before this one has been answered.
      startupProbe:
        httpGet: {path: /health, port: http{{ $scheme }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pod.startupSeconds 9) 10 }}
      # 200 exactly while a token can be produced
      readinessProbe:
        httpGet: {path: /ready, port: http{{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Lost shards are replaced within recovery-timeout. One that cannot help itself for longer starts anew.
      livenessProbe:
        httpGet: {path: /health, port: http{{ $scheme }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pod.livenessSeconds 9) 10 }}
      lifecycle:
        # Endpoints forget a pod while it still serves; SIGTERM comes after that, and serve.sh drains.
        preStop:
          exec:
            command: [/bin/sleep, {{ $pod.endpointSeconds | quote }}]
      {{- else if .outlasts }}
      lifecycle:
        # An upgrade ends all pods at once: servers drain with the shards and the head that they need.
        preStop:
          exec:
            command: [/bin/sleep, {{ add $root.Values.server.endpointSeconds $root.Values.server.drainSeconds 30 | quote }}]
      {{- end }}
      {{- $resources := deepCopy ($pod.resources | default dict) }}
      {{- with include "latentray.acceleratorResource" $accelerator }}
      {{- $resources = mergeOverwrite $resources (dict "requests" (dict . 1) "limits" (dict . 1)) }}
      {{- end }}
      {{- with $resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/latentray
          readOnly: true
        - name: shared-mem
          mountPath: /dev/shm
        {{- include "latentray.scratchMounts" $root | nindent 8 }}
        {{- if .serves }}
        {{- with include "latentray.accessMounts" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- if $root.Values.model.existingClaim }}
        - name: models
          mountPath: {{ $root.Values.model.mountPath }}
          readOnly: true
        {{- end }}
        {{- if .data }}
        - name: data
          mountPath: {{ $root.Values.batch.mountPath }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "latentray.fullname" $root }}
    - name: shared-mem
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pod.sharedMemory | default "1Gi" }}
    - name: scratch
      emptyDir:
        sizeLimit: {{ $pod.scratch | default "20Gi" }}
    {{- if .serves }}
    {{- with include "latentray.accessVolumes" $root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with $root.Values.model.existingClaim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ . }}
        readOnly: true
    {{- end }}
    {{- if .data }}
    - name: data
      persistentVolumeClaim:
        claimName: {{ $root.Values.batch.existingClaim }}
    {{- end }}
{{- end }}
