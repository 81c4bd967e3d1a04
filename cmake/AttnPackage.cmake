# `cpack -G DEB` in a build folder configured with -DCMAKE_INSTALL_PREFIX=/usr
# makes libattn<major> and libattn-dev. Give the packager's own name and address
# with -DCPACK_PACKAGE_CONTACT="Name <address>".
if(NOT CPACK_PACKAGE_CONTACT)
    set(CPACK_PACKAGE_CONTACT "The libattn developers <libattn@example.org>")
endif()
set(attn_deb_runtime "libattn${PROJECT_VERSION_MAJOR}")
set(attn_deb_dev libattn-dev)

# Debian wants two documents in a folder of the package's name.
find_program(ATTN_GZIP gzip)
mark_as_advanced(ATTN_GZIP)
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr" AND ATTN_GZIP)
    # The C locale's day and month, and SOURCE_DATE_EPOCH if it is set.
    string(TIMESTAMP attn_date "%a, %d %b %Y %H:%M:%S +0000" UTC)
    file(WRITE "${PROJECT_BINARY_DIR}/changelog" "\
libattn (${PROJECT_VERSION}) unstable; urgency=medium

  * Version ${PROJECT_VERSION}; what is new stands in NEWS.md.

 -- ${CPACK_PACKAGE_CONTACT}  ${attn_date}
")
    execute_process(COMMAND "${ATTN_GZIP}" -9nf "${PROJECT_BINARY_DIR}/changelog")
    foreach(component IN ITEMS runtime dev)
        set(folder "${CMAKE_INSTALL_DATADIR}/doc/${attn_deb_${component}}")
        install(FILES "${PROJECT_BINARY_DIR}/changelog.gz"
            DESTINATION "${folder}" COMPONENT ${component})
        install(FILES LICENSE RENAME copyright
            DESTINATION "${folder}" COMPONENT ${component})
    endforeach()
else()
    install(FILES LICENSE NEWS.md docs/features.md docs/cache.md docs/merge.md
        docs/rotary.md docs/backward.md docs/bars.md
        DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT dev)
endif()

set(CPACK_PACKAGE_NAME libattn)
set(CPACK_PACKAGE_VENDOR "The libattn developers")
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGING_INSTALL_PREFIX "${CMAKE_INSTALL_PREFIX}")
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE
    GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL runtime dev)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME "${attn_deb_runtime}")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
# CPack also writes the older postinst that calls ldconfig; both are harmless.
file(WRITE "${PROJECT_BINARY_DIR}/triggers" "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
    "${PROJECT_BINARY_DIR}/triggers")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME "${attn_deb_dev}")
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
    "${attn_deb_runtime} (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEV_PACKAGE_RECOMMENDS "libopenblas-dev | libblas-dev")
string(CONCAT attn_deb_text
    "libattn computes softmax(scale Q K^T + mask) V, and the layers around\n"
    "it, in float32 and float64. All matrix products go through CBLAS.")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "${attn_deb_text}")
set(CPACK_COMPONENT_DEV_DESCRIPTION
    "${attn_deb_text}\n.\nThis package holds what programs are built with.")
include(CPack)
